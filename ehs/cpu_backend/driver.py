# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """Triton driver for the interpreter on a machine without a GPU."""

    @classmethod
    def is_active(cls) -> bool:
        """Active under the interpreter, and only where no GPU driver is: Triton allows one active driver."""
        if os.environ.get("TRITON_INTERPRET") != "1":
            return False
        from triton.backends import backends

        return not any(backend.driver.is_active() for name, backend in backends.items() if name != "cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: launchers are compiled, and nothing is compiled here."""
        raise NotImplementedError(f"no C++ type for {ty!r}: Triton backend 'cpu' runs in the interpreter only")

    def get_current_target(self) -> Any:
        """Target "cpu", version 0, with a warp of one."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Timer for autotuned kernels: host time of each call in milliseconds."""
        return benchmark

    def get_device_interface(self) -> Any:
        """`torch.cpu`, where Triton wants a device module."""
        return torch.cpu


def benchmark(kernel: Callable[[], object], *, quantiles: list[float] | None = None, **_: Any) -> list[float]:
    """Time one call after one warm-up and give that figure for every quantile (ms)."""
    from time import perf_counter

    kernel()
    start = perf_counter()
    kernel()
    return [(perf_counter() - start) * 1e3] * len(quantiles or [0.5])
