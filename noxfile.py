# SPDX-License-Identifier: Apache-2.0
"""Sessions. All share one environment, `.venv`, made by `dev`; with --no-venv they use the Python that runs nox."""

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "typecheck", "tests"]

ROOT = Path(__file__).parent
VENV = ROOT / ".venv"
STAMP = VENV / "ehs-requirements.txt"
# Inside a container image with vLLM the environment is the image's; nox says so on its command line only.
NO_VENV = "--no-venv" in sys.argv
# vLLM's CPU build needs the CPU build of torch, which its makers keep in an index of their own.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FIND_TORCH = "from importlib.util import find_spec; print('found' if find_spec('torch') else 'missing')"
# Writes and reads one record in a temporary folder.
ROUND_TRIP = """
import pathlib, tempfile, torch
from ehs import read_hidden_states, store
path = pathlib.Path(tempfile.mkdtemp()) / "record.safetensors"
metadata = dict.fromkeys(store.METADATA_KEYS, "") | {"layer_ids": "[0, 1]", "dtype": "float32"}
store.write_record(path, torch.ones(3, 2, 4), torch.tensor([5, 6, 7]), metadata)
assert read_hidden_states(path).token_ids.tolist() == [5, 6, 7]
"""
INSTALL = ("-m", "pip", "install", "-qq")
# They do not match torch's CPU build and break `import transformers`; text models need none of them.
NOT_WANTED = {"torchvision", "torchaudio", "torchcodec"}


def has_gpu() -> bool:
    """Ask NVML, as `ehs` does; the Python that runs nox has no binding for it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint(0)
    found = nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    return found and count.value > 0


def environment(session: nox.Session) -> str:
    """Python of the shared environment, which is made or renewed when its requirements changed."""
    device = "gpu" if has_gpu() else "cpu"
    if device == "cpu" and os.environ.get("EHS_REQUIRE_GPU") == "1":
        session.error("EHS_REQUIRE_GPU=1 is set, but NVML finds no NVIDIA GPU; unset it to run on the CPU")
    if NO_VENV:
        session.run("python", "-m", "pip", "install", "-qq", "--editable", ".[reference]", *test_requirements())
        return "python"
    python = str(VENV / "bin" / "python")
    requirements = ROOT / "requirements" / f"{device}.txt"
    wanted = requirements.read_text() + (ROOT / "pyproject.toml").read_text()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return python
    session.log(f"making {VENV.name} for {device} from {requirements.relative_to(ROOT)}: a few minutes, about 4 GB")
    shutil.rmtree(VENV, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(VENV), silent=True)
    if device == "cpu":
        install_cpu_torch(session, python)
    session.run(python, *INSTALL, "--no-deps", "--requirement", str(requirements))
    session.run(python, *INSTALL, "--no-deps", "--editable", ".")
    STAMP.write_text(wanted)
    return python


def install_cpu_torch(session: nox.Session, python: str) -> None:
    """Install the pinned torch from where pip looks anyway, or else from the index of its makers, for it alone."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    session.run(python, *INSTALL, "--no-deps", torch, silent=True, log=False, success_codes=[0, 1])
    found = session.run(python, "-c", FIND_TORCH, silent=True, log=False)
    if str(found).strip() != "found":
        session.run(python, *INSTALL, "--no-deps", "--index-url", TORCH_CPU_INDEX, torch)


def test_requirements() -> list[str]:
    """The dependency group `test`, for a pip that does not know groups."""
    return list(nox.project.load_toml("pyproject.toml")["dependency-groups"]["test"])


@nox.session
def dev(session: nox.Session) -> None:
    """Make .venv with vLLM, the tools and ehs, so that .venv/bin/ehs and .venv/bin/pytest work."""
    environment(session)
    session.log("ready: .venv/bin/ehs doctor")


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff on the code and zizmor on the workflows."""
    python = environment(session)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")
    zizmor = str(Path(python).parent / "zizmor") if Path(python).is_absolute() else "zizmor"
    session.run(zizmor, "--offline", "--quiet", ".github/workflows")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Run mypy in strict mode over the package, the tests and this file."""
    session.run(environment(session), "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit tests and the checks of the repository itself (no engine, under a minute)."""
    run_suite(session, environment(session), "unit")


@nox.session(venv_backend="venv", reuse_venv=True)
def imports(session: nox.Session) -> None:
    """Prove in an environment of its own that ehs imports, reads and answers without vLLM."""
    install_cpu_torch(session, "python")
    session.install("-qq", "--constraint", "requirements/cpu.txt", ".")
    session.run("python", "-c", "import ehs, ehs.cli, ehs.config, ehs.doctor, ehs.layers, ehs.store, ehs.verify.run")
    session.run("ehs", "--version")
    session.run("python", "-c", ROUND_TRIP)
    session.run("ehs", "faults", "--json", silent=True)
    session.run("ehs", "doctor", success_codes=[3])
    session.run("ehs", "verify", success_codes=[3])


@nox.session
def gpu_e2e(session: nox.Session) -> None:
    """Run every scenario in real engines, on an NVIDIA GPU or else on the CPU; prints the table, writes reports/."""
    python = environment(session)
    probe = (
        "from ehs.cpu_backend.environment import find_device as f; d = f(); print(f'{d.kind} ({d.name}); {d.reason}')"
    )
    device = session.run(python, "-c", probe, silent=True)
    session.log(f"gpu_e2e runs on: {str(device).strip()}")
    run_suite(session, python, "gpu_e2e")


@nox.session
def perf(session: nox.Session) -> None:
    """Run the benchmarks side by side and store them under .benchmarks/ (never a pass or fail on time)."""
    run_suite(session, environment(session), "perf")


def run_suite(session: nox.Session, python: str, suite: str) -> None:
    """Run one folder of tests; without a selection of one's own, every declared test must run."""
    selection = session.posargs or ["--declared", suite]
    session.run(python, "-m", "pytest", f"tests/{suite}", *selection)


@nox.session(venv_backend="venv")
@nox.parametrize("device", ["cpu", "gpu"])
def lock(session: nox.Session, device: str) -> None:
    """Resolve pyproject.toml anew and write requirements/<device>.txt."""
    session.install("pip>=25.1")
    report = Path(session.create_tmp()) / "report.json"
    session.run(
        *("python", "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--report", str(report)),
        *(f".[{device}]", "--group", "test", "--group", "lint"),
    )
    resolved = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    dropped = {"ehs"} | (NOT_WANTED if device == "cpu" else set())
    lines = [
        f"# Written by `nox -s lock`; installed with --no-deps. Python {sys.version_info[0]}.{sys.version_info[1]}."
    ]
    lines += [f"{name}=={version}" for name, version in sorted(resolved.items()) if name not in dropped]
    (ROOT / "requirements" / f"{device}.txt").write_text("\n".join(lines) + "\n")
