# SPDX-License-Identifier: Apache-2.0
import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

Runner = Literal["v1", "v2"]


class MissingGpuError(RuntimeError):
    """A GPU was required and none was found."""


@dataclass(frozen=True)
class Device:
    """What the engine runs on.

    Attributes:
        kind: "cuda" or "cpu".
        name: product name of the first GPU, or of the processor.
        reason: why this device was chosen.
    """

    kind: Literal["cuda", "cpu"]
    name: str
    reason: str


def find_device() -> Device:
    """An NVIDIA GPU if NVML finds one, else the CPU.

    Raises:
        MissingGpuError: `EHS_REQUIRE_GPU=1` is set and NVML finds none.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            count = pynvml.nvmlDeviceGetCount()
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)) if count else ""
        finally:
            pynvml.nvmlShutdown()
        reason = f"NVML found {count} NVIDIA GPU(s)" if count else "NVML found no NVIDIA GPU"
    except pynvml.NVMLError as error:
        name, reason = "", f"no NVIDIA GPU: {error}"
    if name:
        return Device("cuda", name.decode() if isinstance(name, bytes) else name, reason)
    if os.environ.get("EHS_REQUIRE_GPU") == "1":
        raise MissingGpuError(f"EHS_REQUIRE_GPU=1 is set, but this machine has {reason}; unset it to run on the CPU")
    return Device("cpu", processor_name(), reason)


def processor_name() -> str:
    """Model name of the first processor as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "unknown processor"


def _kv_cache_gib() -> int:
    value = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"VLLM_CPU_KVCACHE_SPACE={value!r}: whole GiB are needed, 1 or more")
    return int(value)


def set_environment(
    device: Device, *, runner: Runner = "v2", multiprocessing: bool = False, world_size: int = 1
) -> None:
    """Set what the engine reads from the environment; child processes inherit it.

    Args:
        device: where the engine will run.
        runner: model runner that vLLM is asked for.
        multiprocessing: run vLLM's engine core in a process of its own (vLLM's default) instead of in this one.
        world_size: worker processes of the engine; on a CPU they share the cores evenly.

    Raises:
        ValueError: `VLLM_CPU_KVCACHE_SPACE` is set to something that is not a whole number of GiB.
        RuntimeError: triton was imported before, without the interpreter: it is too late to choose the CPU backend.
    """
    variables = {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device.kind == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("triton was imported before set_environment(): the CPU backend can no longer be chosen")
        cores = sorted(os.sched_getaffinity(0))
        variables |= {
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(len(cores))),
            # GiB; the scenarios need far less, and vLLM's default takes a share of all memory.
            "VLLM_CPU_KVCACHE_SPACE": str(_kv_cache_gib()),
        }
        if world_size > 1:
            # One worker per part; vLLM's own binding wants a NUMA node for each.
            bounds = [rank * len(cores) // world_size for rank in range(world_size + 1)]
            # With fewer cores than workers some share one.
            parts = [cores[start : max(stop, start + 1)] for start, stop in pairwise(bounds)]
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
    os.environ.update(variables)
