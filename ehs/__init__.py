# SPDX-License-Identifier: Apache-2.0
"""Hidden-state extraction for vLLM's Model Runner V2. Imports without vLLM."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ehs.config import ExtractionConfig
    from ehs.layers import LayerSelection
    from ehs.store import HiddenStates, HiddenStatesError, read_hidden_states

__all__ = ["ExtractionConfig", "HiddenStates", "HiddenStatesError", "LayerSelection", "read_hidden_states"]

_HOME = {
    "ExtractionConfig": "ehs.config",
    "HiddenStates": "ehs.store",
    "HiddenStatesError": "ehs.store",
    "LayerSelection": "ehs.layers",
    "read_hidden_states": "ehs.store",
}


def __getattr__(name: str) -> Any:
    # Lazy: Triton imports ehs.cpu_backend in every process and should not pay for torch and pydantic.
    if name not in _HOME:
        raise AttributeError(f"module 'ehs' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
