# SPDX-License-Identifier: Apache-2.0
# One verification: engines are run one after another, each in a process of its own, and their records judged.
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from ehs import __version__
from ehs.compat import check_vllm
from ehs.config import ExtractionConfig, Speculator, usable_folder
from ehs.cpu_backend.environment import Runner, find_device, set_environment
from ehs.engine.launch import run_engine
from ehs.engine.plan import Round, RoundTrace, SessionPlan, SessionResult
from ehs.layers import LayerSelection
from ehs.models.checkpoints import PREDICTABLE_VOCAB_SIZE, find_checkpoint
from ehs.verify.faults import FAULTS
from ehs.verify.judge import Expectation, Judge, Verdict
from ehs.verify.limits import LIMITS, find_limit
from ehs.verify.prompts import Prompts, arithmetic_prompts, text_prompts
from ehs.verify.reference import Baseline, PredictableReference, Reference, read_model_config
from ehs.verify.report import EngineRun, ScenarioResult, Status, VerifyReport, now
from ehs.verify.scenarios import ENGINES, SCENARIOS, DidNotHappenError, EngineSettings, Scenario

Progress = Callable[[str], None]

# Dtypes a model is verified in when none is named.
USUAL_DTYPES = {
    "predictable": ("float32", "bfloat16", "float16"),
    "tiny-llama": ("float32",),
}
REAL_MODEL_DTYPES = ("float32", "bfloat16")
ENGINE_TIMEOUT_S = 900.0


class EngineStartError(RuntimeError):
    """The engine did not start on this machine; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """What to verify.

    Attributes:
        model: name, folder or Hugging Face id.
        dtypes: engine dtypes; empty means the model's usual ones.
        layers: replaces the usual layer ids where a scenario does not need its own.
        scenarios: names; empty means all.
        speculator: subject.
        runner: model runner that vLLM is asked for.
        fault: name of a fault to inject.
        tensor_parallel_size: ranks that share a layer.
        pipeline_parallel_size: stages.
        output: folder for logs and reports.
    """

    model: str = "predictable"
    dtypes: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    scenarios: tuple[str, ...] = ()
    speculator: Speculator = "ehs"
    runner: Runner = "v2"
    fault: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    output: Path = Path("reports")


def check_options(options: Options) -> None:
    """Refuse what cannot be run before anything is started.

    Raises:
        ValueError: an unknown name, or a combination that does not exist; the message names setting, value and choices.
    """
    choices: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
        ("scenario", options.scenarios, tuple(SCENARIOS)),
        ("fault", (options.fault,) if options.fault else (), tuple(FAULTS)),
        ("dtype", options.dtypes, tuple(dict.fromkeys(limit.dtype for limit in LIMITS))),
        ("speculator", (options.speculator,), get_args(Speculator)),
        ("runner", (options.runner,), get_args(Runner)),
    )
    for setting, values, allowed in choices:
        for value in values:
            if value not in allowed:
                raise ValueError(f"{setting}={value!r}: choose from {', '.join(allowed)}")
    for setting, size in (
        ("tensor_parallel_size", options.tensor_parallel_size),
        ("pipeline_parallel_size", options.pipeline_parallel_size),
    ):
        if size < 1:
            raise ValueError(f"{setting}={size}: 1 or more")
    if options.speculator == "ehs" and options.runner == "v1":
        raise ValueError("runner='v1': the speculator 'ehs' runs on v2 only; use --speculator upstream with v1")
    if options.fault and options.speculator != "ehs":
        raise ValueError(
            f"fault={options.fault!r}: faults are put into the speculator 'ehs', not {options.speculator!r}"
        )
    usable_folder("output", options.output)


class Verification:
    """A model under verification: its checkpoint, references and prompts are loaded once and used for every dtype.

    Args:
        options: what to verify.
        progress: called with one line for each stage.

    Raises:
        ValueError: an option is wrong for this model.
        UnsupportedVllmError: there is no vLLM this code knows.
        MissingGpuError: a GPU is required and missing.
        CheckpointError: the model cannot be fetched.
    """

    def __init__(self, options: Options, progress: Progress = lambda _: None) -> None:
        check_options(options)
        check_vllm()
        self.options = options
        self.progress = progress
        self.device = find_device()
        set_environment(self.device)
        self.path = find_checkpoint(options.model, progress)
        self.model_config = read_model_config(self.path)
        self.num_hidden_layers: int = self.model_config["num_hidden_layers"]
        self.dtypes = tuple(dict.fromkeys(options.dtypes)) or USUAL_DTYPES.get(options.model, REAL_MODEL_DTYPES)
        if options.layers is not None:
            LayerSelection(options.layers, self.num_hidden_layers)
        self.is_predictable = options.model == "predictable"
        if Path(self.path).is_dir():
            # Everything needed is on this disk: nobody should wait for a hub to time out.
            os.environ["HF_HUB_OFFLINE"] = "1"
        self._references: dict[str, Reference] = {}
        self._baselines: dict[str, Baseline] = {}
        self._prompts: Prompts | None = None

    def report(self) -> VerifyReport:
        """An empty report of this verification."""
        return VerifyReport(
            created=now(),
            ehs_version=__version__,
            command=" ".join(["ehs", *sys.argv[1:]]),
            device=self.device,
            host=describe_host(),
            speculator=self.options.speculator,
            runner=self.options.runner,
            fault=self.options.fault,
        )

    def run(self) -> VerifyReport:
        """Run every dtype and every scenario asked for."""
        report = self.report()
        start = time.monotonic()
        names = self.options.scenarios or tuple(SCENARIOS)
        wanted = sorted((SCENARIOS[name] for name in SCENARIOS if name in names), key=_engine_order)
        for dtype in self.dtypes:
            for engine, scenarios in groupby(wanted, lambda scenario: scenario.engine):
                settings, here = ENGINES[engine], list(scenarios)
                if reason := self._too_long(settings):
                    report.results += [self._result(dtype, item, "NOT RUN", evidence=reason) for item in here]
                    continue
                results, run = self.run_engine(dtype, settings, here)
                report.results += results
                report.engines.append(run)
        report.seconds = time.monotonic() - start
        return report

    def _result(self, dtype: str, scenario: Scenario, status: Status, **values: Any) -> ScenarioResult:
        return ScenarioResult(model=self.options.model, dtype=dtype, scenario=scenario.name, status=status, **values)

    def run_engine(
        self, dtype: str, settings: EngineSettings, scenarios: Sequence[Scenario]
    ) -> tuple[list[ScenarioResult], EngineRun]:
        """Run some scenarios in one engine process and judge what it wrote.

        Raises:
            EngineStartError: the engine did not start, for a reason that lies in this machine or in the settings.
        """
        start = time.monotonic()
        self.progress(f"{self.options.model} {dtype}: engine {settings.name!r}, {len(scenarios)} scenarios")
        logs = self.options.output / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{Path(self.options.model).name}-{dtype}-{settings.name}.log"
        with tempfile.TemporaryDirectory(prefix="ehs-records-") as storage:
            plan, layer_ids = self._plan(dtype, settings, scenarios, storage)
            answer = run_engine(plan, log, timeout=ENGINE_TIMEOUT_S)
            if answer.stage == "start" and (remedy := _find_remedy(answer.error or "")):
                raise EngineStartError(f"{remedy}: {answer.error} (engine log: {log})")
            self.progress(f"{self.options.model} {dtype}: judging")
            judge = self._judge(dtype)
            results = [self._judge_scenario(judge, dtype, scenario, layer_ids, answer, log) for scenario in scenarios]
        run = EngineRun(
            model=self.options.model,
            dtype=dtype,
            engine=settings.name,
            layers=list(plan.config.layers),
            subject=answer.subject,
            start_seconds=round(answer.start_seconds, 2),
            total_seconds=round(time.monotonic() - start, 2),
            error=answer.error,
        )
        return results, run

    def _too_long(self, settings: EngineSettings) -> str:
        """Reason why this engine's prompts are too long for the model, empty when they are not."""
        longest = self.model_config.get("max_position_embeddings") or settings.arguments["max_model_len"]
        if longest >= settings.arguments["max_model_len"]:
            return ""
        return f"needs {settings.arguments['max_model_len']} positions, the model has {longest}"

    def _plan(
        self, dtype: str, settings: EngineSettings, scenarios: Sequence[Scenario], storage: str
    ) -> tuple[SessionPlan, tuple[int, ...]]:
        layers = tuple(settings.layers(self.num_hidden_layers))
        if self.options.layers is not None and not settings.own_layers:
            layers = self.options.layers
        layer_ids = LayerSelection(layers, self.num_hidden_layers).layer_ids
        if self.options.speculator == "upstream":
            # Upstream stops at negative ids; the order is left as it is, that is its own affair.
            layers = layer_ids
        arguments = settings.arguments | {
            "tensor_parallel_size": self.options.tensor_parallel_size,
            "pipeline_parallel_size": self.options.pipeline_parallel_size,
        }
        plan = SessionPlan(
            model=self.path,
            dtype=dtype,
            config=ExtractionConfig(layers=layers, storage_path=Path(storage), speculator=self.options.speculator),
            engine=arguments,
            rounds=[planned for scenario in scenarios for planned in scenario.plan(self.prompts)],
            device=self.device,
            runner=self.options.runner,
            fault=self.options.fault,
        )
        return plan, layer_ids

    @property
    def prompts(self) -> Prompts:
        """Source of prompts for this model."""
        if self._prompts is None:
            self._prompts = arithmetic_prompts if self.is_predictable else text_prompts(self.path)
        return self._prompts

    def _reference(self, dtype: str) -> Reference:
        if dtype not in self._references:
            self.progress(f"{self.options.model}: loading the {dtype} reference")
            self._references[dtype] = Reference(self.path, dtype)
        return self._references[dtype]

    def _judge(self, dtype: str) -> Judge:
        limit = find_limit(self.options.model, dtype)
        if self.is_predictable:
            exact = PredictableReference(self.model_config["hidden_size"], self.num_hidden_layers)
            return Judge(limit, exact, predictable_vocab_size=PREDICTABLE_VOCAB_SIZE)
        truth = self._reference("float32")
        if limit.rule != "baseline":
            return Judge(limit, truth)
        if dtype not in self._baselines:
            self._baselines[dtype] = Baseline(truth, self._reference(dtype))
        return Judge(limit, truth, self._baselines[dtype])

    def _judge_scenario(
        self,
        judge: Judge,
        dtype: str,
        scenario: Scenario,
        layer_ids: tuple[int, ...],
        answer: SessionResult,
        log: Path,
    ) -> ScenarioResult:
        result = self._result(dtype, scenario, "PASS", rule=judge.limit.rule)
        traces = [trace for trace in answer.rounds if trace.scenario == scenario.name]
        planned = scenario.plan(self.prompts)
        if len(traces) < len(planned):
            result.status = "ERROR"
            result.problems = [f"the engine broke before this scenario ended: {answer.error} (log: {log})"]
            return result
        verdict = Verdict()
        expectations = list(self._expectations(planned, traces, layer_ids, dtype))
        for expected in expectations:
            judge.judge(expected, verdict, expectations)
        result.worst = verdict.worst
        result.layer_errors = [verdict.layer_errors[layer] for layer in sorted(verdict.layer_errors)]
        result.num_records, result.num_values = verdict.num_records, verdict.num_values
        result.problems = verdict.problems + self._wrong_subject(answer)
        try:
            result.evidence = scenario.evidence(traces)
        except DidNotHappenError as error:
            result.problems.append(f"the situation did not come about: {error}")
        if result.problems:
            result.status = "FAIL"
        return result

    @staticmethod
    def _expectations(
        planned: Sequence[Round], traces: Sequence[RoundTrace], layer_ids: tuple[int, ...], dtype: str
    ) -> Iterator[Expectation]:
        for number, (asked, trace) in enumerate(zip(planned, traces, strict=True)):
            for outcome in trace.outcomes:
                spec = asked.requests[outcome.request]
                name = f"request {outcome.request}"
                if len(planned) > 1:
                    name = f"call {number}, {name}"
                if spec.sampling.get("n", 1) > 1:
                    name = f"{name}, sample {outcome.sample}"
                yield Expectation(name, spec, outcome, layer_ids, dtype)

    def _wrong_subject(self, answer: SessionResult) -> list[str]:
        """A run proves that the code under test ran."""
        subject = answer.subject
        assert subject is not None
        package = {"ehs": "ehs.", "upstream": "vllm."}[self.options.speculator]
        problems = []
        if subject.runner != self.options.runner:
            problems.append(f"runner {self.options.runner} was asked for, {subject.runner_class} ran")
        if not subject.speculator_class.startswith(package):
            problems.append(f"speculator {self.options.speculator} was asked for, {subject.speculator_class} ran")
        return problems


def _engine_order(scenario: Scenario) -> int:
    return list(ENGINES).index(scenario.engine)


# Part of an engine's message, what to say instead.
_REMEDIES = (
    (
        "Available memory on node",
        "less memory is free than the KV cache was given; lower VLLM_CPU_KVCACHE_SPACE (GiB) or end other processes",
    ),
    (
        "KV cache",
        "the KV cache does not fit into memory; on a CPU raise VLLM_CPU_KVCACHE_SPACE (GiB), on a GPU free memory",
    ),
    ("Free memory on device", "too little GPU memory is free; end other processes on the GPU"),
    ("CUDA out of memory", "the GPU is out of memory; end other processes on the GPU or choose a smaller model"),
    ("Model Runner V2 requires Triton", "Triton found no backend; reinstall with `nox -s dev`, see `ehs doctor`"),
)


def _find_remedy(error: str) -> str | None:
    """What to do when the engine's message is about this machine, None when it is not."""
    return next((remedy for part, remedy in _REMEDIES if part in error), None)


def describe_host() -> dict[str, str]:
    """Machine and versions, as every report states them."""
    versions = {}
    for name in ("torch", "triton", "transformers", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "vllm": " ".join(check_vllm()),
        **versions,
    }
