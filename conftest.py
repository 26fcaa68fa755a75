# SPDX-License-Identifier: Apache-2.0
# A suite that quietly shrinks proves nothing: with --declared, every test of tests/declared.toml must run and pass.
import tomllib
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "tests"
REPORTS = Path(__file__).parent / "reports"
RAN = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--declared", metavar="SUITE", help="fail when fewer tests of this suite passed than declared")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RAN] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected_failure = report.skipped and hasattr(report, "wasxfail")
    if report.when == "call" and (report.passed or expected_failure):
        item.config.stash[RAN][item.path.name] += 1
    return report


def shortfalls(suite: str, ran: Counter[str]) -> list[str]:
    """Files of a suite in which fewer tests passed than declared."""
    declared: dict[str, int] = tomllib.loads((TESTS / "declared.toml").read_text())[suite]
    return [
        f"{suite}/{name}: {ran[name]} of {number} declared tests passed"
        for name, number in declared.items()
        if ran[name] < number
    ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    suite = session.config.getoption("--declared")
    if suite and shortfalls(suite, session.config.stash[RAN]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    suite = config.getoption("--declared")
    if not suite:
        return
    ran = config.stash[RAN]
    missing = shortfalls(suite, ran)
    terminalreporter.section(f"declared tests of {suite}")
    for line in missing:
        terminalreporter.write_line(line, red=True)
    line = f"{suite}: {ran.total()} tests passed, {'too few' if missing else 'all that are declared'}"
    terminalreporter.write_line(line)
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / f"{suite}.ran").write_text(line + "\n")
