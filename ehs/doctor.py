# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.version import Version
from pydantic import BaseModel

from ehs import __version__
from ehs.compat import SUPPORTED, UnsupportedVllmError, check_vllm
from ehs.config import usable_folder
from ehs.cpu_backend.environment import Device, MissingGpuError, find_device
from ehs.models.checkpoints import cache_folder

Health = Literal["ok", "warning", "problem"]

PROBE_TIMEOUT_S = 60
# What the smallest engine and its reference take, seen with SmolLM2 in fp32 (4.1 GiB) and rounded up.
NEEDED_MEMORY_GIB = 6
# smollm2 in the cache (0.3 GB), twice while it is built, and the records of a verification.
NEEDED_DISK_GIB = 2
_PROBE = """
import json, sys
from ehs.cpu_backend.environment import find_device, set_environment
set_environment(find_device())
import vllm
from vllm.triton_utils import HAS_TRITON
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.gpu.spec_decode import extract_hidden_states
from vllm.platforms import current_platform
name = extract_hidden_states.ExtractHiddenStatesSpeculator.__module__
print(json.dumps({"triton": HAS_TRITON, "platform": current_platform.device_name, "installed": name == "ehs.plugin"}))
"""


class Finding(BaseModel):
    """One thing looked at, and what to do about it when it is not well."""

    subject: str
    health: Health
    detail: str
    remedy: str = ""


class Diagnosis(BaseModel):
    """What this machine can run.

    Attributes:
        findings: everything that was looked at.
        can_run: what works here.
        cannot_run: what does not, each with its reason.
    """

    ehs: str
    findings: list[Finding]
    can_run: list[str]
    cannot_run: dict[str, str]

    @property
    def works(self) -> bool:
        """True when `ehs verify` can run here."""
        return not any(finding.health == "problem" for finding in self.findings)


def diagnose() -> Diagnosis:
    """Look at everything; takes as long as importing vLLM once."""
    findings = [_python(), _vllm(), *_libraries()]
    device, gpu = _device()
    findings.append(gpu)
    if findings[1].health == "ok":
        findings += _engine(device)
    findings += [_folder("cache (EHS_CACHE)", cache_folder()), _folder("temporary files (TMPDIR)", _temporary_folder())]
    findings.append(_memory())
    works = not any(finding.health == "problem" for finding in findings)
    can_run, cannot_run = _abilities(device, works=works)
    return Diagnosis(ehs=__version__, findings=findings, can_run=can_run, cannot_run=cannot_run)


def _python() -> Finding:
    version = sys.version_info
    supported = (3, 11) <= version[:2] <= (3, 13)
    detail = f"{version.major}.{version.minor}.{version.micro}, {sys.executable}"
    remedy = "" if supported else "use Python 3.11 to 3.13"
    return Finding(subject="Python", health="ok" if supported else "problem", detail=detail, remedy=remedy)


def _vllm() -> Finding:
    try:
        name, version = check_vllm()
    except UnsupportedVllmError as error:
        allowed = " to ".join(".".join(map(str, pair)) for pair in SUPPORTED)
        remedy = f"`nox -s dev` installs one; supported: {allowed}"
        return Finding(subject="vLLM", health="problem", detail=str(error), remedy=remedy)
    return Finding(subject="vLLM", health="ok", detail=f"{name} {version}")


def _libraries() -> list[Finding]:
    wanted = (
        ("torch", "2.11", "problem", "the engine and the reference need it"),
        ("triton", "3.0", "problem", "Model Runner V2 needs it"),
        ("safetensors", "0.8", "problem", "older ones hold the interpreter lock while they write"),
        ("transformers", "5.0", "problem", "the reference model runs in it"),
        ("gguf", "0.19", "warning", "needed to convert smollm2"),
        ("accelerate", "1.10", "warning", "needed to convert smollm2"),
    )
    findings = []
    for name, least, otherwise, reason in wanted:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = ""
        good = bool(version) and Version(version) >= Version(least)
        findings.append(
            Finding(
                subject=name,
                health="ok" if good else otherwise,  # type: ignore[arg-type] # the literals of the table
                detail=version or "not installed",
                remedy="" if good else f"install {name} {least} or newer: {reason}",
            )
        )
    return findings


def _device() -> tuple[Device | None, Finding]:
    try:
        device = find_device()
    except MissingGpuError as error:
        return None, Finding(subject="GPU", health="problem", detail=str(error), remedy="unset EHS_REQUIRE_GPU")
    if device.kind == "cuda":
        return device, Finding(subject="GPU", health="ok", detail=f"{device.name} ({device.reason})")
    remedy = "not needed: the CPU backend runs the same engine; figures of speed need a GPU"
    return device, Finding(subject="GPU", health="warning", detail=device.reason, remedy=remedy)


def _engine(device: Device | None) -> list[Finding]:
    """Import vLLM in a process of its own and see whether Triton and the plugin are there."""
    if device is None:
        return []
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        detail = f"importing vLLM took more than {PROBE_TIMEOUT_S} s"
        return [Finding(subject="engine", health="problem", detail=detail, remedy="try again on an idle machine")]
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if done.returncode or not isinstance(answer, dict):
        detail = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        remedy = "reinstall with `nox -s dev`; a torchvision that does not fit torch is a frequent cause"
        return [Finding(subject="engine", health="problem", detail=detail, remedy=remedy)]
    backend = "compiled for the GPU" if device.kind == "cuda" else "interpreter, backend 'cpu'"
    return [
        Finding(
            subject="Triton in vLLM",
            health="ok" if answer["triton"] else "problem",
            detail=backend if answer["triton"] else "vLLM sees no Triton backend",
            remedy=""
            if answer["triton"]
            else "install ehs as a package (`nox -s dev`): its entry point is the backend",
        ),
        Finding(
            subject="plugin",
            health="ok" if answer["installed"] else "problem",
            detail="the ehs speculator is installed in vLLM" if answer["installed"] else "vLLM did not load it",
            remedy="" if answer["installed"] else "check VLLM_PLUGINS: when set, it must name ehs",
        ),
    ]


def _temporary_folder() -> Path:
    import tempfile

    return Path(tempfile.gettempdir())


def _folder(subject: str, folder: Path) -> Finding:
    try:
        folder = usable_folder(subject, folder)
    except ValueError as error:
        return Finding(subject=subject, health="problem", detail=str(error), remedy="name another folder")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    enough = free >= NEEDED_DISK_GIB
    remedy = "" if enough else f"free {NEEDED_DISK_GIB} GiB or name another folder"
    health: Health = "ok" if enough else "warning"
    return Finding(subject=subject, health=health, detail=f"{folder}: {free:.0f} GiB free", remedy=remedy)


def _memory() -> Finding:
    available = psutil.virtual_memory().available / 2**30
    enough = available >= NEEDED_MEMORY_GIB
    remedy = "" if enough else f"smollm2 wants {NEEDED_MEMORY_GIB} GiB; predictable and tiny-llama take less"
    health: Health = "ok" if enough else "warning"
    return Finding(subject="memory", health=health, detail=f"{available:.0f} GiB available", remedy=remedy)


def _abilities(device: Device | None, *, works: bool) -> tuple[list[str], dict[str, str]]:
    verify = "ehs verify (real Model Runner V2 engine)"
    gpu_only = "CUDA graphs, compiled Triton kernels, GPU timings"
    if not works or device is None:
        reason = "see the problems above"
        return [], {verify: reason, gpu_only: reason}
    if device.kind == "cuda":
        return [f"{verify} on {device.name}", gpu_only], {}
    return [f"{verify} on the CPU, Triton kernels interpreted"], {gpu_only: device.reason}
