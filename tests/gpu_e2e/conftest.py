# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ehs.cpu_backend.environment import Device, MissingGpuError, find_device
from ehs.testing.matrix import Matrix
from ehs.verify.report import render, write_report

REPORTS = Path(__file__).parents[2] / "reports"
Cli = Callable[..., subprocess.CompletedProcess[str]]


MATRIX = pytest.StashKey[Matrix]()
DEVICE = pytest.StashKey[Device]()


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[DEVICE] = find_device()
    except MissingGpuError as error:
        pytest.exit(str(error), returncode=3)


def pytest_report_header(config: pytest.Config) -> str:
    device = config.stash[DEVICE]
    return f"device: {device.kind} ({device.name}); {device.reason}"


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = {item.callspec.params["cell"] for item in session.items if _has_cell(item)}  # type: ignore[attr-defined]
    session.config.stash[MATRIX] = Matrix(wanted, REPORTS)


def _has_cell(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and "cell" in item.callspec.params


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Matrix:
    return request.config.stash[MATRIX]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    return request.config.stash[DEVICE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    report = config.stash[MATRIX].report if MATRIX in config.stash else None
    if report is None:
        return
    report.command = "nox -s gpu_e2e"
    paths = write_report(report, REPORTS, "gpu_e2e")
    terminalreporter.section("scenarios x models")
    console = Console(file=sys.stdout, highlight=False, width=160, force_terminal=None)
    console.print(render(report))
    terminalreporter.write_line(f"reports: {', '.join(str(path.relative_to(REPORTS.parent)) for path in paths)}")


@pytest.fixture
def ehs(tmp_path: Path) -> Cli:
    """Run the `ehs` command of this environment in an empty folder."""

    def run(*arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ehs", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )

    return run
