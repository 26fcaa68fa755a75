# SPDX-License-Identifier: Apache-2.0
# What `ehs verify` says: JSON with a versioned schema, one self-contained HTML page, a table in the terminal.
import math
import os
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ehs.cpu_backend.environment import Device
from ehs.engine.plan import Subject

SCHEMA_VERSION = 1
Status = Literal["PASS", "FAIL", "ERROR", "NOT RUN"]
_STYLES: dict[str, str] = {"PASS": "green", "FAIL": "bold red", "ERROR": "bold magenta", "NOT RUN": "yellow"}

_WORDS: dict[Status, str] = {"PASS": "passed", "FAIL": "failed", "ERROR": "broke", "NOT RUN": "not run"}

# JSON has no infinity; a bitwise error is infinitely more than nothing.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value == "inf" else value),
    PlainSerializer(lambda value: "inf" if math.isinf(value) else value, when_used="json"),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Place(_Model):
    """The worst value of a scenario: where it stands, what it is, what it should be.

    `error` is the row's |x - ref| / |ref|, `excess` its error as a multiple of the limit.
    """

    request: str
    token: int
    token_id: int
    layer_id: int
    column: int
    channel: int
    got: float
    expected: float
    error: Number
    excess: Number
    row_says: str | None = None

    def in_words(self) -> str:
        """One line."""
        where = f"{self.request}, token {self.token} (id {self.token_id}), layer id {self.layer_id}"
        values = f"channel {self.channel} is {self.got:g}, expected {self.expected:g}"
        if self.row_says:
            values += f"; the row says it is {self.row_says}"
        return f"{where}: {values}"


class LayerError(_Model):
    """Largest relative error per token of one layer id in a scenario, and largest multiple of the limit."""

    layer_id: int
    error: Number
    excess: Number


class ScenarioResult(_Model):
    """One cell of the table."""

    model: str
    dtype: str
    scenario: str
    status: Status
    evidence: str = ""
    rule: str = ""
    num_records: int = 0
    num_values: int = 0
    worst: Place | None = None
    layer_errors: list[LayerError] = []
    problems: list[str] = []

    @property
    def error_in_words(self) -> str:
        """Largest error for the table."""
        if self.worst is None:
            return "-"
        if self.rule == "bitwise":
            return "exact" if self.worst.error == 0 else "differs"
        return f"{max(layer.error for layer in self.layer_errors):.1e}"

    @property
    def share_of_limit(self) -> str:
        """Largest error as a share of what is allowed."""
        if self.worst is None or self.rule == "bitwise":
            return "-"
        return f"{self.worst.excess:.0%}"


class EngineRun(_Model):
    """One engine process: what it was given, what really ran, how long it took (seconds)."""

    model: str
    dtype: str
    engine: str
    layers: list[int]
    subject: Subject | None
    start_seconds: float
    total_seconds: float
    error: str | None = None


class VerifyReport(_Model):
    """Everything one `ehs verify` found."""

    schema_version: int = SCHEMA_VERSION
    created: str
    ehs_version: str
    command: str
    device: Device
    host: dict[str, str]
    speculator: str
    runner: str
    fault: str | None = None
    results: list[ScenarioResult] = []
    engines: list[EngineRun] = []
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True when something was judged and nothing is wrong."""
        judged = [result for result in self.results if result.status != "NOT RUN"]
        broken = any(run.error for run in self.engines)
        return bool(judged) and not broken and all(result.status == "PASS" for result in judged)

    @property
    def verdict(self) -> str:
        """PASS or FAIL with the counts."""
        counts = {word: sum(result.status == status for result in self.results) for status, word in _WORDS.items()}
        words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return f"{'PASS' if self.passed else 'FAIL'}: {words or 'nothing was judged'}"

    @property
    def num_records(self) -> int:
        """Records judged."""
        return sum(result.num_records for result in self.results)

    def subjects(self) -> list[str]:
        """Runner and speculator classes that ran, as read off the live engines."""
        seen = {
            f"Model Runner {run.subject.runner.upper()} ({run.subject.runner_class}), {run.subject.speculator_class}"
            for run in self.engines
            if run.subject
        }
        return sorted(seen)


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def render(report: VerifyReport) -> Group:
    """The table for a terminal."""
    title = f"ehs verify: {report.speculator} on runner {report.runner}, {report.device.name}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, options in _COLUMNS.items():
        table.add_column(name, **options)
    for result in report.results:
        table.add_row(
            result.model,
            result.dtype,
            result.scenario,
            Text(result.status, style=_STYLES[result.status]),
            result.error_in_words,
            result.share_of_limit,
            str(result.num_records),
            result.evidence,
        )
    lines: list[Any] = [table]
    lines += [Text(line, style="red") for line in problem_lines(report)]
    lines += [Text(f"proved to have run: {subject}") for subject in report.subjects()]
    if report.fault:
        lines.append(Text(f"injected fault: {report.fault}", style="yellow"))
    lines.append(Text(f"{report.verdict} ({report.num_records} records, {report.seconds:.0f} s)", style="bold"))
    return Group(*lines)


def problem_lines(report: VerifyReport) -> list[str]:
    """What went wrong, a line each; the same problem of several scenarios is told once."""
    places: dict[str, list[str]] = {}
    for result in report.results:
        for problem in result.problems:
            places.setdefault(problem, []).append(f"{result.model} {result.dtype} {result.scenario}")
    for run in report.engines:
        if run.error and not any(run.error in problem for problem in places):
            places[f"the engine broke: {run.error}"] = [f"{run.model} {run.dtype} {run.engine}"]
    return [f"{', '.join(dict.fromkeys(where))}: {problem}" for problem, where in places.items()]


def layer_rows(report: VerifyReport) -> list[dict[str, Any]]:
    """Largest error and excess per model, dtype and layer id, over all scenarios."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for result in report.results:
        for layer in result.layer_errors:
            new = {"model": result.model, "dtype": result.dtype, **layer.model_dump()}
            row = rows.setdefault((result.model, result.dtype, layer.layer_id), new)
            row["error"], row["excess"] = max(row["error"], layer.error), max(row["excess"], layer.excess)
    return [rows[key] for key in rows]


_COLUMNS: dict[str, dict[str, Any]] = {
    "model": {"no_wrap": True},
    "dtype": {"no_wrap": True},
    "scenario": {"no_wrap": True},
    "verdict": {"no_wrap": True},
    "worst error": {"justify": "right"},
    "of limit": {"justify": "right"},
    "records": {"justify": "right"},
    "what happened": {},
}


def print_report(report: VerifyReport, console: Console) -> None:
    """Print the table."""
    console.print(render(report))


def write_report(report: VerifyReport, folder: Path, name: str = "verify") -> tuple[Path, Path]:
    """Write `<name>.json` and `<name>.html`, each by rename; returns both paths."""
    from jinja2 import Environment, StrictUndefined

    folder.mkdir(parents=True, exist_ok=True)
    template = (resources.files("ehs.verify") / "report.html.j2").read_text()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    html = environment.from_string(template).render(
        report=report, lines=problem_lines(report), layers=layer_rows(report)
    )
    paths = folder / f"{name}.json", folder / f"{name}.html"
    for path, text in zip(paths, (report.model_dump_json(indent=1), html), strict=True):
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.replace(path)
    return paths
