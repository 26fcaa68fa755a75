# SPDX-License-Identifier: Apache-2.0
# Exit status: 0 good; 1 a check failed; 2 usage or configuration; 3 this machine cannot run it.
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ehs import __version__

app = typer.Typer(
    name="ehs",
    help="Hidden-state extraction for vLLM's Model Runner V2, and the proof that the numbers are right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class Exit(IntEnum):
    """Exit status of every command."""

    GOOD = 0
    FAILED = 1
    USAGE = 2
    MACHINE = 3
    INTERRUPTED = 130


class Interrupted(BaseException):
    """Ctrl-C. Not a KeyboardInterrupt: typer would catch that one and say nothing of what became of the run."""


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted


def console(*, stderr: bool = False) -> Console:
    """A console that prints whole tables where the output is not a terminal, too."""
    out = Console(stderr=stderr, highlight=False)
    return out if out.is_terminal or "COLUMNS" in os.environ else Console(stderr=stderr, highlight=False, width=160)


def main() -> None:
    """Entry point of the `ehs` script."""
    signal.signal(signal.SIGINT, _interrupt)
    with _errors_in_one_line():
        app()


@contextmanager
def _bad_input() -> Iterator[None]:
    """Around what reads the user's settings: a ValueError there is theirs, anywhere else it is a bug of ours."""
    try:
        yield
    except ValueError as error:
        _end(Exit.USAGE, error)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Turn what a machine or a user can cause into one line and an exit status."""
    from ehs.compat import UnsupportedVllmError
    from ehs.cpu_backend.environment import MissingGpuError

    try:
        yield
    except (UnsupportedVllmError, MissingGpuError) as error:
        _end(Exit.MACHINE, error)
    except Interrupted:
        _end(Exit.INTERRUPTED, "interrupted; engine processes are ended, no report was written")
    except RuntimeError as error:
        # Their modules import torch; by now they are loaded if one of theirs was raised.
        if type(error).__name__ not in {"EngineStartError", "CheckpointError"}:
            raise
        _end(Exit.MACHINE, error)


def _end(status: Exit, reason: object) -> None:
    print("ehs:", " ".join(str(reason).split()), file=sys.stderr)  # noqa: T201 - one plain line, no wrapping
    sys.exit(status)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))  # noqa: T201 - data goes to stdout as it is


def _print_table(title: str, rows: list[dict[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))
    console().print(table)


def _print_list(title: str, rows: list[dict[str, str]], *, as_json: bool) -> None:
    if as_json:
        _print_json(rows)
    else:
        _print_table(title, rows)


@app.callback(invoke_without_command=True)
def _common(*, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit


@app.command()
def verify(
    model: Annotated[
        str, typer.Argument(help="predictable, tiny-llama, smollm2, a folder with config.json, or a Hugging Face id.")
    ] = "predictable",
    *,
    layers: Annotated[str, typer.Option(help="Layer ids, comma-separated; negative ids count from the end.")] = "",
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16 or float16; repeatable. Default: what suits the model.")
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Name from `ehs scenarios`; repeatable. Default: all.")
    ] = None,
    speculator: Annotated[str, typer.Option(help="Whose speculator is judged: ehs or upstream.")] = "ehs",
    runner: Annotated[str, typer.Option(help="vLLM's model runner: v2, or v1 (upstream only).")] = "v2",
    fault: Annotated[str | None, typer.Option(help="Inject a bug, a name from `ehs faults`; must end in FAIL.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(help="Stages the layers are split over.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder for verify.json, verify.html and engine logs.")] = Path(
        "reports"
    ),
    as_json: Json = False,
) -> None:
    """Run scenarios in real engines, compare every number with a reference, print the table, write the reports."""
    from ehs.verify.report import print_report, write_report
    from ehs.verify.run import Options, Verification

    with _bad_input():
        options = Options(
            model=model,
            dtypes=tuple(dtype or ()),
            layers=_parse_layers(layers),
            scenarios=tuple(scenario or ()),
            speculator=speculator,  # type: ignore[arg-type] # checked by check_options, with a message
            runner=runner,  # type: ignore[arg-type]
            fault=fault,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            output=output,
        )
    progress = console(stderr=True)
    with progress.status("starting") as status:

        def show(line: str) -> None:
            if progress.is_terminal:
                status.update(line)
            else:
                print(line, file=sys.stderr, flush=True)  # noqa: T201

        with _bad_input():
            verification = Verification(options, show)
        show(f"device: {verification.device.kind} ({verification.device.name}); {verification.device.reason}")
        report = verification.run()
    paths = write_report(report, output)
    if as_json:
        print(report.model_dump_json(indent=1))  # noqa: T201
    else:
        print_report(report, console())
        console().print(f"reports: {', '.join(map(str, paths))}")
    raise typer.Exit(Exit.GOOD if report.passed else Exit.FAILED)


def _parse_layers(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layers {text!r}: comma-separated integers are needed, for example 2,15,-1") from None


@app.command()
def doctor(*, as_json: Json = False) -> None:
    """Say what this machine can run: vLLM, Model Runner V2, Triton, GPU, storage; each problem with its remedy."""
    from ehs.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        _print_json({**diagnosis.model_dump(), "works": diagnosis.works})
    else:
        _print_table(f"ehs {diagnosis.ehs}", [finding.model_dump() for finding in diagnosis.findings])
        for ability in diagnosis.can_run:
            console().print(Text(f"can run: {ability}", style="green"))
        for ability, reason in diagnosis.cannot_run.items():
            console().print(Text(f"cannot run: {ability}: {reason}", style="yellow"))
    raise typer.Exit(Exit.GOOD if diagnosis.works else Exit.MACHINE)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A record (.safetensors) or a folder of records.")],
    *,
    as_json: Json = False,
) -> None:
    """Say what is in a record or a folder of records, and whether each is whole."""
    from ehs.store import inspect_path

    with _bad_input():
        found = inspect_path(path)
    if as_json:
        _print_json([{**asdict(item), "path": str(item.path)} for item in found])
    else:
        rows = [
            {
                "file": item.path.name,
                "tokens": str(item.summary.get("num_tokens", "-")),
                "layer ids": str(item.summary.get("layer_ids", "-")),
                "hidden": str(item.summary.get("hidden_size", "-")),
                "dtype": str(item.summary.get("dtype", "-")),
                "speculator": str(item.summary.get("speculator", "-")),
                "whole": item.problem or "yes",
            }
            for item in found
        ]
        _print_table(str(path), rows)
    raise typer.Exit(Exit.FAILED if any(item.problem for item in found) else Exit.GOOD)


@app.command()
def scenarios(*, as_json: Json = False) -> None:
    """List the scenarios: ways the engine may schedule the same prompts."""
    from ehs.verify.scenarios import SCENARIOS

    rows = [{"scenario": item.name, "what happens": item.summary, "engine": item.engine} for item in SCENARIOS.values()]
    _print_list("scenarios", rows, as_json=as_json)


@app.command()
def faults(*, as_json: Json = False) -> None:
    """List the faults: mechanisms of public bugs that the harness must catch when they are put back."""
    from ehs.verify.faults import FAULTS

    rows = [
        {"fault": item.name, "what goes wrong": item.summary, "where": item.site, "seen in": item.reference}
        for item in FAULTS.values()
    ]
    _print_list("faults", rows, as_json=as_json)
