# SPDX-License-Identifier: Apache-2.0
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ehs.cpu_backend.environment import Device, MissingGpuError, find_device, processor_name, set_environment

UseNvml = Callable[..., Any]
CPU, GPU = Device("cpu", "test", "test"), Device("cuda", "test", "test")


@pytest.mark.parametrize("name", ["NVIDIA H200", b"NVIDIA H200"])
def test_a_gpu_is_used_when_nvml_finds_one(nvml: UseNvml, environ: dict[str, str], name: str | bytes) -> None:
    fake = nvml(2, name=name)
    for required in ("0", "1"):
        environ["EHS_REQUIRE_GPU"] = required
        device = find_device()
        assert (device.kind, device.name) == ("cuda", "NVIDIA H200")
        assert "2" in device.reason
    assert fake.num_open == 0


@pytest.mark.parametrize("count", [0, None])
def test_the_cpu_is_used_where_nvml_finds_nothing_and_the_reason_is_given(
    nvml: UseNvml, environ: dict[str, str], count: int | None
) -> None:
    fake = nvml(count)
    environ.pop("EHS_REQUIRE_GPU", None)
    device = find_device()
    assert (device.kind, device.name) == ("cpu", processor_name())
    assert ("Not Found" if count is None else "found no NVIDIA GPU") in device.reason
    assert fake.num_open == 0


@pytest.mark.parametrize("count", [0, None])
def test_a_required_gpu_that_is_missing_is_an_error_that_says_what_to_do(
    nvml: UseNvml, environ: dict[str, str], count: int | None
) -> None:
    nvml(count)
    environ["EHS_REQUIRE_GPU"] = "1"
    with pytest.raises(MissingGpuError, match=r"EHS_REQUIRE_GPU=1 is set.*unset it"):
        find_device()


def test_nvml_is_closed_when_a_gpu_breaks_while_it_is_asked(nvml: UseNvml, environ: dict[str, str]) -> None:
    environ.pop("EHS_REQUIRE_GPU", None)
    fake = nvml(1)
    fake.fails_at_name = True
    device = find_device()
    assert device.kind == "cpu"
    assert "GPU is lost" in device.reason
    assert fake.num_open == 0


def test_a_machine_without_cpuinfo_has_a_processor_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert processor_name() == "unknown processor"


@pytest.mark.parametrize(("runner", "wanted"), [("v2", "1"), ("v1", "0")])
def test_the_runner_asked_for_is_set_whatever_was_set_before(environ: dict[str, str], runner: Any, wanted: str) -> None:
    for before in ("0", "1"):
        environ["VLLM_USE_V2_MODEL_RUNNER"] = before
        set_environment(CPU, runner=runner)
        assert environ["VLLM_USE_V2_MODEL_RUNNER"] == wanted


def test_the_engine_runs_in_this_process_unless_asked_otherwise(environ: dict[str, str]) -> None:
    set_environment(CPU)
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    set_environment(CPU, multiprocessing=True)
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_only_a_cpu_gets_the_interpreter(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    environ.pop("TRITON_INTERPRET", None)
    set_environment(GPU)
    assert "TRITON_INTERPRET" not in environ
    set_environment(CPU)
    assert environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("value", [None, "0"])
def test_it_is_too_late_for_the_cpu_once_triton_was_imported_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], value: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    environ.pop("TRITON_INTERPRET", None)
    if value is not None:
        environ["TRITON_INTERPRET"] = value
    before = dict(environ)
    with pytest.raises(RuntimeError, match="triton was imported before"):
        set_environment(CPU)
    assert environ == before
    set_environment(GPU)
    environ["TRITON_INTERPRET"] = "1"
    set_environment(CPU)


def test_what_the_user_set_for_threads_and_memory_is_kept(environ: dict[str, str]) -> None:
    environ |= {"OMP_NUM_THREADS": "3", "VLLM_CPU_KVCACHE_SPACE": "7"}
    set_environment(CPU)
    assert (environ["OMP_NUM_THREADS"], environ["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "7")


def test_threads_are_as_many_as_the_cores_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    environ.pop("OMP_NUM_THREADS", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 9})
    set_environment(CPU)
    assert environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "4GiB"])
def test_a_cache_size_that_is_no_whole_number_of_gib_is_refused(environ: dict[str, str], value: str) -> None:
    environ["VLLM_CPU_KVCACHE_SPACE"] = value
    with pytest.raises(ValueError, match=f"VLLM_CPU_KVCACHE_SPACE='{value}'"):
        set_environment(CPU)


@pytest.mark.parametrize(("num_cores", "world_size"), [(8, 2), (2, 2), (7, 3), (1, 2)])
def test_each_worker_gets_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], num_cores: int, world_size: int
) -> None:
    cores = set(range(10, 10 + num_cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    set_environment(CPU, world_size=world_size)
    parts = [set(map(int, part.split(","))) for part in environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")]
    assert len(parts) == world_size
    assert all(parts)
    assert set.union(*parts) <= cores
    # No two workers on one core as long as there are enough, and never more than one core apart.
    if num_cores >= world_size:
        assert sum(map(len, parts)) == len(set.union(*parts)) == num_cores
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_workers_share_all_cores(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    set_environment(CPU, world_size=2)
    parts = environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    assert sorted(core for part in parts for core in part.split(",")) == list("01234567")


def test_one_worker_is_not_bound(environ: dict[str, str]) -> None:
    environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    set_environment(CPU)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environ
