# SPDX-License-Identifier: Apache-2.0
# Whole verifications of the predictable model; the engine process is played by FakeEngine of conftest.py.
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ehs.compat import UnsupportedVllmError
from ehs.cpu_backend.environment import MissingGpuError
from ehs.verify.prompts import arithmetic_prompts
from ehs.verify.report import VerifyReport
from ehs.verify.run import EngineStartError, Options, Verification, check_options


@pytest.fixture
def verify(tmp_path: Path, fake_engine: Any) -> Callable[..., VerifyReport]:
    assert fake_engine

    def run(*scenarios: str, **options: Any) -> VerifyReport:
        known: dict[str, Any] = {"dtypes": ("float32",), "output": tmp_path / "reports"}
        return Verification(Options(scenarios=scenarios, **(known | options))).run()

    return run


def statuses(report: VerifyReport) -> list[str]:
    return [result.status for result in report.results]


def test_a_right_engine_passes_in_every_dtype_with_every_record_counted(
    verify: Callable[..., VerifyReport], fake_engine: Any
) -> None:
    report = verify("plain", dtypes=("float32", "bfloat16", "float16"))
    assert statuses(report) == ["PASS"] * 3
    assert report.passed
    assert [(result.num_records, result.num_values) for result in report.results] == [
        (4, (5 + 23 + 48 + 91) * 4 * 128)
    ] * 3
    assert "4 requests in a step" in report.results[0].evidence
    assert [plan.dtype for plan in fake_engine.plans] == ["float32", "bfloat16", "float16"]


def test_scenarios_that_share_an_engine_run_in_one_and_each_judges_its_own_rounds(
    verify: Callable[..., VerifyReport], fake_engine: Any
) -> None:
    report = verify("any-order", "generated-tokens", "plain")
    assert [result.scenario for result in report.results] == ["plain", "generated-tokens", "any-order"]
    assert statuses(report) == ["PASS"] * 3
    assert [[planned.scenario for planned in plan.rounds] for plan in fake_engine.plans] == [
        ["plain", "generated-tokens"],
        ["any-order"],
    ]
    assert [run.engine for run in report.engines] == ["roomy", "any-order"]


def test_damaged_states_fail_with_their_place(verify: Callable[..., VerifyReport], fake_engine: Any) -> None:
    fake_engine.damage = lambda states: states.roll(1, dims=0)
    report = verify("plain")
    assert statuses(report) == ["FAIL"]
    assert not report.passed
    assert "request 0, token 0" in report.results[0].problems[0]


def test_damage_to_one_scenario_does_not_fail_its_neighbour(
    verify: Callable[..., VerifyReport], fake_engine: Any
) -> None:
    fake_engine.damage = lambda states: states * (states.shape[0] < 60)
    report = verify("plain", "generated-tokens")
    assert statuses(report) == ["FAIL", "PASS"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"runner": "v1", "runner_class": "vllm.V1Runner"}, "runner v2 was asked for, vllm.V1Runner ran"),
        ({"speculator_class": "vllm.Upstream"}, "speculator ehs was asked for, vllm.Upstream ran"),
        # The plugin was not loaded and nothing drafted.
        ({"speculator_class": "builtins.NoneType"}, "speculator ehs was asked for, builtins.NoneType ran"),
    ],
)
def test_right_numbers_of_another_subject_prove_nothing(
    verify: Callable[..., VerifyReport], fake_engine: Any, wrong: dict[str, str], said: str
) -> None:
    fake_engine.answer = {"subject": fake_engine.subject(**wrong)}
    report = verify("plain")
    assert statuses(report) == ["FAIL"]
    assert report.results[0].problems == [said]


def test_upstream_is_judged_as_upstream(verify: Callable[..., VerifyReport], fake_engine: Any) -> None:
    fake_engine.answer = {"subject": fake_engine.subject(speculator_class="vllm.Upstream")}
    assert verify("plain", speculator="upstream").passed
    fake_engine.answer = {}
    assert not verify("plain", speculator="upstream").passed


def test_upstream_gets_ids_it_can_read(verify: Callable[..., VerifyReport], fake_engine: Any) -> None:
    fake_engine.answer = {"subject": fake_engine.subject(speculator_class="vllm.Upstream")}
    verify("any-order", speculator="upstream")
    assert fake_engine.plans[0].config.layers == (5, 0, 6, 5)


def test_right_numbers_without_the_situation_prove_nothing(
    verify: Callable[..., VerifyReport], fake_engine: Any
) -> None:
    fake_engine.one_request_a_step = True
    report = verify("plain")
    assert statuses(report) == ["FAIL"]
    assert "did not come about" in report.results[0].problems[0]


def test_an_engine_that_breaks_leaves_its_unfinished_scenarios_as_errors_with_the_log(
    verify: Callable[..., VerifyReport], fake_engine: Any
) -> None:
    fake_engine.answer = {"rounds": [], "stage": "run", "error": "RuntimeError: broken"}
    report = verify("plain", "sampling")
    assert statuses(report) == ["ERROR", "ERROR"]
    assert not report.passed
    assert "RuntimeError: broken" in report.results[0].problems[0]
    assert "predictable-float32-roomy.log" in report.results[0].problems[0]
    assert report.engines[0].error == "RuntimeError: broken"


def test_an_engine_that_does_not_start_for_want_of_memory_says_what_to_do(
    verify: Callable[..., VerifyReport], fake_engine: Any, tmp_path: Path
) -> None:
    fake_engine.answer = {"rounds": [], "subject": None, "stage": "start"}
    fake_engine.answer["error"] = "ValueError: No available memory for the KV cache blocks."
    with pytest.raises(EngineStartError, match="raise VLLM_CPU_KVCACHE_SPACE") as error:
        verify("plain")
    assert str(tmp_path / "reports" / "logs") in str(error.value)
    # Once it ran, what it found is told, whatever broke it then.
    started = {"stage": "run", "subject": fake_engine.subject()}
    fake_engine.answer |= started
    assert statuses(verify("plain")) == ["ERROR"]
    fake_engine.answer |= {"stage": "start", "subject": None}
    # A bug is no matter of the machine.
    fake_engine.answer["error"] = "AttributeError: no attribute 'propose'"
    assert statuses(verify("plain")) == ["ERROR"]


def test_layers_asked_for_replace_the_usual_ones_but_not_those_a_scenario_is_about(
    verify: Callable[..., VerifyReport], fake_engine: Any
) -> None:
    report = verify("plain", "any-order", layers=(3, -1))
    assert [plan.config.layers for plan in fake_engine.plans] == [(3, -1), (-2, 0, -1, -2)]
    assert sorted(layer.layer_id for layer in report.results[0].layer_errors) == [3, 6]
    assert report.passed


def test_parallel_sizes_reach_the_engine(verify: Callable[..., VerifyReport], fake_engine: Any) -> None:
    verify("plain", tensor_parallel_size=2, pipeline_parallel_size=3)
    (plan,) = fake_engine.plans
    assert (plan.engine["tensor_parallel_size"], plan.engine["pipeline_parallel_size"]) == (2, 3)


def test_records_are_gone_when_a_verification_has_ended(verify: Callable[..., VerifyReport], fake_engine: Any) -> None:
    verify("plain")
    assert not fake_engine.plans[0].config.storage_path.exists()


def test_a_report_names_machine_subject_and_command(verify: Callable[..., VerifyReport]) -> None:
    report = verify("plain")
    assert report.device.kind == "cpu"
    assert {"cores", "python", "vllm", "torch"} <= set(report.host)
    assert report.subjects() == ["Model Runner V2 (vllm.Runner), ehs.engine.speculator.ExtractHiddenStatesSpeculator"]
    assert report.seconds > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scenarios": ("plain", "plane")}, "scenario='plane': choose from plain, "),
        ({"fault": "none"}, "fault='none': choose from swap-token-rows, "),
        ({"dtypes": ("float8",)}, "dtype='float8': choose from float32, bfloat16, float16"),
        ({"speculator": "eagle"}, "speculator='eagle': choose from ehs, upstream"),
        ({"runner": "v3"}, "runner='v3': choose from v1, v2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: 1 or more"),
        ({"pipeline_parallel_size": -1}, "pipeline_parallel_size=-1: 1 or more"),
        ({"runner": "v1"}, "runner='v1': the speculator 'ehs' runs on v2 only"),
        ({"fault": "swap-requests", "speculator": "upstream"}, "fault='swap-requests': faults are put into"),
    ],
)
def test_options_that_do_not_exist_are_refused_with_those_that_do(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="=") as error:
        check_options(Options(**options))
    assert str(error.value).startswith(named)


def test_upstream_may_run_on_either_runner() -> None:
    check_options(Options(speculator="upstream", runner="v1"))
    check_options(Options(speculator="upstream", runner="v2"))


@pytest.mark.parametrize(
    ("breaking", "error"),
    [
        ({"options": {"layers": (7,)}}, ValueError),
        ({"vllm": None}, UnsupportedVllmError),
        ({"gpu": "1"}, MissingGpuError),
    ],
)
def test_nothing_is_started_or_written_when_it_cannot_run(
    *,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    verify: Callable[..., VerifyReport],
    fake_engine: Any,
    tmp_path: Path,
    breaking: dict[str, Any],
    error: type[Exception],
) -> None:
    if "vllm" in breaking:
        monkeypatch.setattr("ehs.compat.find_vllm", lambda: None)
    environ["EHS_REQUIRE_GPU"] = breaking.get("gpu", "0")
    with pytest.raises(error):
        verify("plain", **breaking.get("options", {}))
    assert fake_engine.plans == []
    assert not (tmp_path / "reports").exists()


def test_a_local_model_does_not_ask_the_hub(verify: Callable[..., VerifyReport]) -> None:
    verify("plain")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_model_that_is_too_short_for_the_prompts_is_not_run_and_nothing_is_proved(
    verify: Callable[..., VerifyReport], fake_engine: Any, tiny_llama: Path
) -> None:
    report = verify("plain", "chunked-prefill", model=str(tiny_llama))
    assert statuses(report) == ["NOT RUN", "NOT RUN"]
    assert [result.evidence for result in report.results] == [
        "needs 512 positions, the model has 128",
        "needs 1024 positions, the model has 128",
    ]
    assert not report.passed
    assert fake_engine.plans == []


def test_a_model_that_does_not_say_how_long_it_may_be_is_run(
    monkeypatch: pytest.MonkeyPatch, verify: Callable[..., VerifyReport], fake_engine: Any, tmp_path: Path
) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 16, "max_position_embeddings": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fake_engine.answer = {"rounds": [], "subject": None, "stage": "start", "error": "CUDA out of memory"}
    monkeypatch.setattr("ehs.verify.run.text_prompts", lambda _: arithmetic_prompts)
    with pytest.raises(EngineStartError):
        verify("plain", model=str(tmp_path))
