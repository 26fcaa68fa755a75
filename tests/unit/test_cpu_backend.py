# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import backends as triton_backends

from ehs.cpu_backend.compiler import CPUBackend
from ehs.cpu_backend.driver import CPUDriver


def backend(*, active: bool) -> Any:
    return SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: active))


OURS = SimpleNamespace(compiler=CPUBackend, driver=CPUDriver)


def active(monkeypatch: pytest.MonkeyPatch, backends: dict[str, Any]) -> list[str]:
    monkeypatch.setattr(triton_backends, "backends", backends)
    return [name for name, one in backends.items() if one.driver.is_active()]


@pytest.mark.parametrize("first", [True, False])
def test_with_a_gpu_driver_exactly_that_one_is_active(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *, first: bool
) -> None:
    environ["TRITON_INTERPRET"] = "1"
    order = ["cpu", "nvidia", "amd"] if first else ["nvidia", "amd", "cpu"]
    known = {"cpu": OURS, "nvidia": backend(active=True), "amd": backend(active=False)}
    assert active(monkeypatch, {name: known[name] for name in order}) == ["nvidia"]


def test_without_a_gpu_ours_is_the_only_one_active(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    environ["TRITON_INTERPRET"] = "1"
    assert active(monkeypatch, {"nvidia": backend(active=False), "cpu": OURS}) == ["cpu"]


@pytest.mark.parametrize("value", [None, "0", ""])
def test_without_the_interpreter_ours_is_never_active(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], value: str | None
) -> None:
    environ.pop("TRITON_INTERPRET", None)
    if value is not None:
        environ["TRITON_INTERPRET"] = value
    assert active(monkeypatch, {"nvidia": backend(active=False), "cpu": OURS}) == []


_COUNT = """
import json
from triton.backends import backends
from triton.backends.nvidia.driver import CudaDriver

def active():
    return [name for name, backend in backends.items() if backend.driver.is_active()]

before = active()
CudaDriver.is_active = staticmethod(lambda: True)
print(json.dumps([before, active()]))
"""


def test_triton_itself_counts_one_active_driver_with_and_without_a_gpu(environ: dict[str, str]) -> None:
    # A process of its own: backends are found when triton is imported, by their entry points.
    done = subprocess.run(
        [sys.executable, "-c", _COUNT],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
        env=environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert json.loads(done.stdout) == [["cpu"], ["nvidia"]]


def test_the_entry_point_names_this_package() -> None:
    (found,) = metadata.entry_points(group="triton.backends", name="cpu")
    assert found.value == "ehs.cpu_backend"


# Bound here: the interpreter looks names up in the kernel's module.
BLOCK = tl.constexpr(4)


def _double(source: Any, target: Any, length: Any) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < length) * 2, mask=index < length)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter takes the GPU where there is one")
def test_a_kernel_runs_on_cpu_tensors_and_stays_in_its_bounds() -> None:
    kernel = triton.jit(_double)
    source, target = torch.arange(12.0), torch.full((12,), -1.0)
    kernel[(3,)](source, target, 10)
    assert target.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, -1, -1]


def test_the_target_is_the_cpu_and_only_that() -> None:
    target = CPUDriver().get_current_target()
    assert CPUBackend.supports_target(target)
    assert not CPUBackend.supports_target(SimpleNamespace(backend="cuda"))
    assert CPUDriver().get_active_torch_device() == torch.device("cpu")
    CPUDriver().get_device_interface().synchronize()


def test_compiling_is_refused_with_a_reason() -> None:
    compiler = CPUBackend(CPUDriver().get_current_target())
    attempts: list[Any] = [
        lambda: compiler.parse_options({}),
        lambda: compiler.add_stages({}, None),
        lambda: compiler.load_dialects(None),
    ]
    for refuse in attempts:
        with pytest.raises(NotImplementedError, match="interpreter only"):
            refuse()
    with pytest.raises(NotImplementedError, match="interpreter only"):
        CPUDriver().map_python_to_cpp_type("i32")
    assert compiler.get_module_map() == {}


@pytest.mark.parametrize(("quantiles", "number"), [(None, 1), ([0.5], 1), ([0.5, 0.2, 0.8], 3)])
def test_the_benchmarker_gives_milliseconds_for_every_quantile(quantiles: list[float] | None, number: int) -> None:
    calls = []
    times = CPUDriver().get_benchmarker()(
        lambda: calls.append(sum(range(20_000))), quantiles=quantiles, warmup=5, rep=9
    )
    assert len(calls) == 2
    assert len(times) == number
    assert all(0.01 < time < 1000 for time in times)
