# SPDX-License-Identifier: Apache-2.0
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import ehs
from ehs import cli as cli_module
from ehs.store import write_error
from ehs.verify.faults import FAULTS
from ehs.verify.report import VerifyReport
from ehs.verify.scenarios import SCENARIOS

Cli = Callable[..., Any]
SaveRecord = Callable[..., Path]


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    """Nothing of this file may start one."""
    assert cache.is_dir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ehs.verify.run.run_engine", lambda *_, **__: pytest.fail("an engine was started"))


def assert_one_line(result: Any, *parts: str) -> None:
    """What a user did wrong is told in one line, without a traceback and without a report."""
    lines = result.err.splitlines()
    assert lines[-1].startswith("ehs: ")
    assert "Traceback" not in result.err
    for part in parts:
        assert part in lines[-1]
    assert result.out == ""


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--scenario", "plane"], ["scenario='plane'", "chunked-prefill"]),
        (["--scenario", "plain", "--scenario", ""], ["scenario=''"]),
        (["--fault", "typo"], ["fault='typo'", "swap-requests"]),
        (["--dtype", "fp32"], ["dtype='fp32'", "float32"]),
        (["predictible"], ["model='predictible'", "tiny-llama"]),
        (["--layers", "1;2"], ["--layers '1;2'", "2,15,-1"]),
        (["--layers", "1,,2"], ["--layers '1,,2'"]),
        (["--layers", "1.5"], ["--layers '1.5'"]),
        (["predictable", "--layers", "2,7"], ["layers=[2, 7]", "layer id 7", "0 to 6"]),
        (["predictable", "--layers=-8"], ["layer id -8", "-7 to -1"]),
        (["--runner", "v1"], ["runner='v1'", "upstream"]),
        (["--runner", "V2"], ["runner='V2'", "v1, v2"]),
        (["--speculator", "eagle3"], ["speculator='eagle3'", "ehs, upstream"]),
        (["--fault", "swap-requests", "--speculator", "upstream"], ["fault='swap-requests'"]),
        (["--tensor-parallel-size", "0"], ["tensor_parallel_size=0"]),
        (["--pipeline-parallel-size", "0"], ["pipeline_parallel_size=0"]),
    ],
)
def test_wrong_options_of_verify_end_with_status_2_and_one_line(
    cli: Cli, arguments: list[str], parts: list[str]
) -> None:
    result = cli("verify", *arguments)
    assert result.status == 2
    assert_one_line(result, *parts)
    assert not Path("reports").exists()


@pytest.mark.usefixtures("no_engine")
def test_an_output_folder_below_a_file_is_refused_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o777)
    result = cli("verify", "--output", str(tmp_path / "file" / "reports"))
    assert result.status == 2
    assert_one_line(result, "output=", f"{tmp_path / 'file'} is not a folder")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("installed", "part"), [(None, "vLLM is not installed"), (("vllm", "0.99.0"), "vllm 0.99.0 is installed")]
)
def test_a_missing_or_unknown_vllm_ends_with_status_3(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, installed: tuple[str, str] | None, part: str
) -> None:
    monkeypatch.setattr("ehs.compat.find_vllm", lambda: installed)
    result = cli("verify")
    assert result.status == 3
    assert_one_line(result, part, "0.29 to 0.33")
    assert not Path("reports").exists()


@pytest.mark.usefixtures("no_engine")
def test_a_required_gpu_that_is_missing_ends_with_status_3(cli: Cli, environ: dict[str, str]) -> None:
    environ["EHS_REQUIRE_GPU"] = "1"
    result = cli("verify")
    assert result.status == 3
    assert_one_line(result, "EHS_REQUIRE_GPU=1")


@pytest.mark.usefixtures("no_engine")
def test_a_cache_that_cannot_be_written_ends_with_status_3(cli: Cli, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ["EHS_CACHE"] = str(tmp_path / "file" / "cache")
    result = cli("verify")
    assert result.status == 3
    assert_one_line(result, "EHS_CACHE=")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--no-such-option"],
        ["no-such-command"],
        ["verify", "a/b", "c/d"],
        ["inspect"],
        ["verify", "--layers"],
    ],
)
def test_what_typer_refuses_ends_with_status_2_too(cli: Cli, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert "Traceback" not in result.err


@pytest.mark.usefixtures("no_engine")
def test_ctrl_c_is_no_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ehs.verify.run.run_engine", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = cli("verify", "--scenario", "plain", "--dtype", "float32")
    assert result.status == 130
    assert_one_line(result, "interrupted")


def test_a_bug_of_this_program_keeps_its_traceback(cli: Cli, fake_engine: Any, tmp_path: Path) -> None:
    def damage(_states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a bug")

    fake_engine.damage = damage
    with pytest.raises(RuntimeError, match="a bug"):
        cli("verify", "--scenario", "plain", "--output", str(tmp_path / "out"))


# ---- verify that runs ----


def test_a_pass_ends_with_status_0_a_table_and_reports(cli: Cli, fake_engine: Any, tmp_path: Path) -> None:
    assert fake_engine.plans == []
    result = cli("verify", "--scenario", "plain", "--dtype", "float32", "--output", str(tmp_path / "out"))
    assert result.status == 0
    assert "PASS: 1 passed" in result.out
    report = VerifyReport.model_validate_json((tmp_path / "out" / "verify.json").read_text())
    assert report.passed
    assert report.command.startswith("ehs verify --scenario plain")
    assert (tmp_path / "out" / "verify.html").is_file()
    assert str(tmp_path / "out" / "verify.json") in result.out.replace("\n", "")


def test_a_fail_ends_with_status_1_names_the_place_and_writes_reports_all_the_same(
    cli: Cli, fake_engine: Any, tmp_path: Path
) -> None:
    fake_engine.damage = lambda states: states.roll(1, dims=1)
    result = cli("verify", "--scenario", "plain", "--dtype", "bfloat16", "--output", str(tmp_path / "out"))
    assert result.status == 1
    assert "FAIL: 1 failed" in result.out
    assert "request 0, token 0 (id 5), layer id " in result.out
    assert not VerifyReport.model_validate_json((tmp_path / "out" / "verify.json").read_text()).passed


def test_with_json_stdout_is_the_report_and_progress_goes_elsewhere(cli: Cli, fake_engine: Any, tmp_path: Path) -> None:
    result = cli(
        "verify", "--scenario", "plain", "--dtype", "float16", "--layers", "4,-1", "--json", "--output", str(tmp_path)
    )
    report = VerifyReport.model_validate_json(result.out)
    assert report.engines[0].layers == [4, -1] == list(fake_engine.plans[0].config.layers)
    assert "judging" in result.err


def test_an_engine_that_cannot_start_here_ends_with_status_3(cli: Cli, fake_engine: Any, tmp_path: Path) -> None:
    fake_engine.answer = {"rounds": [], "subject": None, "stage": "start", "error": "OutOfMemory: CUDA out of memory."}
    result = cli("verify", "--scenario", "plain", "--output", str(tmp_path / "out"))
    assert result.status == 3
    assert_one_line(result, "the GPU is out of memory")


def test_options_of_verify_reach_the_engine(cli: Cli, fake_engine: Any, tmp_path: Path) -> None:
    fault = next(iter(FAULTS))
    arguments = ["--fault", fault, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"]
    cli("verify", "--scenario", "plain", "--dtype", "float32", "--output", str(tmp_path), *arguments)
    (plan,) = fake_engine.plans
    assert plan.fault == fault
    assert (plan.engine["tensor_parallel_size"], plan.engine["pipeline_parallel_size"]) == (2, 3)


# ---- the other commands ----


def test_the_version_is_printed_alone(cli: Cli) -> None:
    result = cli("--version")
    assert (result.status, result.out) == (0, f"{ehs.__version__}\n")


def test_scenarios_and_faults_are_listed_in_full(cli: Cli) -> None:
    listed = json.loads(cli("scenarios", "--json").out)
    assert [row["scenario"] for row in listed] == list(SCENARIOS)
    listed = json.loads(cli("faults", "--json").out)
    assert {row["fault"]: row["seen in"] for row in listed} == {name: fault.reference for name, fault in FAULTS.items()}
    table = cli("scenarios").out
    assert all(name in table for name in SCENARIOS)


def test_inspecting_whole_records_ends_with_status_0(cli: Cli, tmp_path: Path, save_record: SaveRecord) -> None:
    save_record(tmp_path / "a.safetensors", torch.ones(3, 2, 4), torch.tensor([1, 2, 3]), speculator="ehs.X")
    result = cli("inspect", str(tmp_path), "--json")
    (row,) = json.loads(result.out)
    assert result.status == 0
    assert row["path"] == str(tmp_path / "a.safetensors")
    assert row["problem"] is None
    assert (row["summary"]["num_tokens"], row["summary"]["speculator"]) == (3, "ehs.X")
    table = cli("inspect", str(tmp_path)).out
    assert "a.safetensors" in table
    assert "yes" in table


def test_a_broken_or_failed_record_among_whole_ones_ends_with_status_1(
    cli: Cli, tmp_path: Path, save_record: SaveRecord
) -> None:
    save_record(tmp_path / "a.safetensors", torch.ones(3, 2, 4), torch.tensor([1, 2, 3]))
    write_error(tmp_path / "b.safetensors", "OSError: disk full")
    result = cli("inspect", str(tmp_path))
    assert result.status == 1
    assert "disk full" in result.out
    assert [row["problem"] is None for row in json.loads(cli("inspect", str(tmp_path), "--json").out)] == [True, False]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_inspecting_nothing_ends_with_status_2(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    result = cli("inspect", str(tmp_path / name))
    assert result.status == 2
    assert_one_line(result, "path=", name)


@pytest.mark.parametrize(("columns", "width"), [(None, 160), ("100", 100)])
def test_a_table_is_whole_where_the_output_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert cli_module.console().width == width


def surface() -> dict[str, list[str]]:
    group: Any = typer.main.get_command(cli_module.app)
    return {
        name: [parameter.opts[-1] for parameter in command.params if parameter.name != "help"]
        for name, command in group.commands.items()
    }


def test_commands_and_options_are_frozen() -> None:
    # Scripts count on these; a change is a new version.
    assert surface() == {
        "verify": [
            "model",
            "--layers",
            "--dtype",
            "--scenario",
            "--speculator",
            "--runner",
            "--fault",
            "--tensor-parallel-size",
            "--pipeline-parallel-size",
            "--output",
            "--json",
        ],
        "doctor": ["--json"],
        "inspect": ["path", "--json"],
        "scenarios": ["--json"],
        "faults": ["--json"],
    }


@pytest.mark.parametrize("command", list(surface()))
def test_every_command_explains_itself_and_each_option(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.status == 0
    group: Any = typer.main.get_command(cli_module.app)
    assert all(parameter.help for parameter in group.commands[command].params)
    assert all(option.strip("-") in result.out.lower() for option in surface()[command])


def test_no_arguments_show_the_commands(cli: Cli) -> None:
    result = cli()
    assert all(command in result.out + result.err for command in surface())
