# SPDX-License-Identifier: Apache-2.0
from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend

_REFUSAL = "Triton backend 'cpu' runs kernels in the interpreter only (TRITON_INTERPRET=1); it compiles nothing"


class CPUBackend(BaseBackend):
    """Backend that lets Triton name the CPU as a target; every step of compiling is refused."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """True for the target that `CPUDriver.get_current_target` names."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Identify this backend in Triton's caches."""
        return "ehs-cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        """Refuse: options belong to compiling."""
        raise NotImplementedError(_REFUSAL)

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> NoReturn:
        """Refuse: stages belong to compiling."""
        raise NotImplementedError(_REFUSAL)

    def load_dialects(self, context: Any) -> NoReturn:
        """Refuse: dialects belong to compiling."""
        raise NotImplementedError(_REFUSAL)

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device library is replaced."""
        return {}
