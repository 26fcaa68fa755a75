# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from ehs.cpu_backend.environment import Device
from ehs.verify.report import VerifyReport

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.+)$", README, re.MULTILINE)
EHS_COMMANDS = [command.removeprefix(".venv/bin/ehs ") for command in COMMANDS if command.startswith(".venv/bin/ehs ")]
Cli = Callable[..., CompletedProcess[str]]

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("command", EHS_COMMANDS)
def test_a_command_of_the_readme_does_what_it_says(ehs: Cli, command: str) -> None:
    done = ehs(*shlex.split(command))
    assert done.returncode == (1 if "--fault" in command else 0), done.stdout + done.stderr
    assert done.stdout


def test_every_other_command_of_the_readme_is_run_by_ci() -> None:
    others = [command for command in COMMANDS if not command.startswith(".venv/bin/ehs ")]
    ci = (ROOT / ".ci" / "run").read_text()
    assert [command for command in others if command.replace("pip", "-m pip", 1) not in ci and command not in ci] == []


def test_doctor_is_quick_and_says_what_cannot_run(ehs: Cli, device: Device) -> None:
    start = time.monotonic()
    done = ehs("doctor", "--json")
    assert time.monotonic() - start < 20
    diagnosis = json.loads(done.stdout)
    assert done.returncode == 0
    assert diagnosis["works"]
    if device.kind == "cpu":
        assert diagnosis["can_run"] == [
            "ehs verify (real Model Runner V2 engine) on the CPU, Triton kernels interpreted"
        ]
        assert list(diagnosis["cannot_run"]) == ["CUDA graphs, compiled Triton kernels, GPU timings"]


def test_verify_writes_reports_that_read_back(ehs: Cli, tmp_path: Path) -> None:
    done = ehs("verify", "--dtype", "float16", "--layers", "3,0,-1,3", "--scenario", "plain", "--output", "here")
    assert done.returncode == 0, done.stderr
    report = VerifyReport.model_validate_json((tmp_path / "here" / "verify.json").read_text())
    assert report.passed
    assert report.engines[0].layers == [3, 0, -1, 3]
    assert [layer.layer_id for layer in report.results[0].layer_errors] == [0, 3, 6]
    assert "PASS" in (tmp_path / "here" / "verify.html").read_text()


def test_no_memory_for_the_cache_is_one_line(ehs: Cli, device: Device, tmp_path: Path) -> None:
    if device.kind == "cuda":
        pytest.skip("the limit is a setting of the CPU backend")
    done = ehs("verify", "--dtype", "float32", "--scenario", "plain", VLLM_CPU_KVCACHE_SPACE="100000")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("ehs: less memory is free than the KV cache was given")
    assert not (tmp_path / "reports" / "verify.json").exists()


def test_a_required_gpu_that_is_missing_is_one_line(ehs: Cli, device: Device) -> None:
    if device.kind == "cuda":
        pytest.skip("this machine has one")
    done = ehs("verify", EHS_REQUIRE_GPU="1")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "EHS_REQUIRE_GPU=1" in done.stderr


def test_interrupt_leaves_no_process_and_no_half_file(tmp_path: Path) -> None:
    storage = tmp_path / "tmp"
    storage.mkdir()
    command = [sys.executable, "-m", "ehs", "verify", "--dtype", "float32", "--output", str(tmp_path / "reports")]
    environment = {**os.environ, "TMPDIR": str(storage)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as verify:
        assert verify.stderr is not None
        family: list[psutil.Process] = []
        log = tmp_path / "reports" / "logs" / "predictable-float32-roomy.log"
        deadline = time.monotonic() + 120
        while "kv_cache" not in (log.read_text() if log.exists() else "").lower():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        family = psutil.Process(verify.pid).children(recursive=True)
        assert family
        verify.send_signal(signal.SIGINT)
        _, errors = verify.communicate(timeout=60)
    assert verify.returncode == 130
    assert "\nehs: interrupted" in errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert not list(storage.rglob("*.safetensors"))
    assert not list(storage.rglob("*.tmp"))
    assert not list((tmp_path / "reports").glob("verify*"))
