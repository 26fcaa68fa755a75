# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from ehs.engine.plan import Outcome, RequestSpec, RoundTrace, Step
from ehs.verify.prompts import arithmetic_prompts
from ehs.verify.scenarios import (
    BLOCK_SIZE,
    ENGINES,
    LONG_PROMPT,
    SCENARIOS,
    TIGHT_BLOCKS,
    DidNotHappenError,
    chunked,
    decoded,
    preempted,
    prefix_hit,
    reused,
    several_samples,
    usual_layers,
)


def outcome(request: int = 0, sample: int = 0, outputs: tuple[int, ...] = (1,), cached: int = 0) -> Outcome:
    return Outcome(
        request=request, sample=sample, output_token_ids=list(outputs), path="somewhere", num_cached_tokens=cached
    )


def step(drafts: int = 0, preempted: int = 0, **tokens: int) -> Step:
    return Step(num_scheduled_tokens=tokens, num_draft_tokens=drafts, num_preempted=preempted)


def trace(outcomes: list[Outcome], *steps: Step) -> RoundTrace:
    return RoundTrace(scenario="any", outcomes=outcomes, steps=list(steps))


# Two requests, one after the other, each prompt in one step, one token each, two samples that are equal.
NOTHING_SPECIAL = trace([outcome(0), outcome(1, 0, (5,)), outcome(1, 1, (5,))], step(a=30), step(b=12))


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_no_scenario_takes_a_run_in_which_nothing_special_happened_for_its_own(name: str) -> None:
    with pytest.raises(DidNotHappenError):
        SCENARIOS[name].evidence([NOTHING_SPECIAL])


@pytest.mark.parametrize(
    ("name", "traces", "words"),
    [
        ("plain", [trace([outcome(0), outcome(1)], step(a=1), step(a=30, b=12, c=1))], "up to 3 requests"),
        ("repeated-use", [trace([outcome()], step(a=3))] * 3, "3 calls"),
        ("chunked-prefill", [trace([outcome()], step(a=128), step(a=72, b=3), step(a=1))], "2 chunks"),
        (
            "prefix-hit",
            [trace([outcome()], step(a=99)), trace([outcome(0, cached=96), outcome(1, cached=64)])],
            "96, 64 cached",
        ),
        (
            "preemption",
            [trace([outcome()], step(a=9), step(preempted=2, a=9), step(preempted=1, a=9))],
            "requests preempted: 3",
        ),
        (
            "several-samples",
            [trace([outcome(0, 0, (1, 2)), outcome(0, 1, (1, 3)), outcome(1, 0, (1,)), outcome(1, 1, (2,))])],
            "at least 2",
        ),
        ("sampling", [trace([outcome(0, outputs=(4, 5, 6))], step(drafts=1, a=9), step(drafts=2, a=3))], "3 tokens"),
    ],
)
def test_a_situation_that_came_about_is_told_in_words(name: str, traces: list[RoundTrace], words: str) -> None:
    assert words in SCENARIOS[name].evidence(traces)


@pytest.mark.parametrize(
    ("evidence", "traces"),
    [
        # The prefix must be hit by every request of the last call, not by some request at some time.
        (prefix_hit, [trace([outcome(cached=96)]), trace([outcome(0, cached=96), outcome(1)])]),
        # Samples must differ within each request.
        (
            several_samples,
            [trace([outcome(0, 0, (1,)), outcome(0, 1, (2,)), outcome(1, 0, (3,)), outcome(1, 1, (3,))])],
        ),
        # Different requests give different samples without any sampling.
        (several_samples, [trace([outcome(0, 0, (1,)), outcome(1, 0, (2,))])]),
        (decoded, [trace([outcome(0, outputs=(1, 2, 3)), outcome(1, outputs=(1,))], step(a=3))]),
        (reused, [trace([outcome()], step(a=3)), trace([outcome()])]),
        # One token a step is decoding, not a chunk.
        (chunked, [trace([outcome()], step(a=30), step(a=1), step(a=1), step(a=1))]),
        (preempted, []),
    ],
)
def test_half_a_situation_is_none(evidence: Any, traces: list[RoundTrace]) -> None:
    with pytest.raises(DidNotHappenError):
        evidence(traces)


def test_verifying_drafts_is_no_chunked_prefill() -> None:
    with pytest.raises(DidNotHappenError):
        chunked([trace([outcome()], step(a=30), step(drafts=1, a=2), step(drafts=1, a=2))])


@pytest.mark.parametrize("evidence", [prefix_hit, several_samples, decoded])
def test_a_call_without_outcomes_is_no_evidence(evidence: Any) -> None:
    with pytest.raises(DidNotHappenError):
        evidence([trace([])])


# ---- the plans fit the engines they are made for ----


def rounds(name: str) -> list[list[RequestSpec]]:
    return [planned.requests for planned in SCENARIOS[name].plan(arithmetic_prompts)]


def length(request: RequestSpec) -> int:
    total: int = len(request.prompt_token_ids) + request.sampling["max_tokens"]
    return total


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_request_fits_its_engine(name: str) -> None:
    arguments = ENGINES[SCENARIOS[name].engine].arguments
    usable = arguments.get("num_gpu_blocks_override", 10**6) - 1
    for requests in rounds(name):
        assert requests
        for request in requests:
            assert len(request.prompt_token_ids) >= 1
            assert length(request) <= arguments["max_model_len"]
            assert blocks(length(request)) <= usable


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_plan_names_its_scenario_and_is_the_same_each_time(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.name == name
    assert {planned.scenario for planned in scenario.plan(arithmetic_prompts)} == {name}
    assert scenario.plan(arithmetic_prompts) == scenario.plan(arithmetic_prompts)


def test_scenarios_are_described_each_in_its_own_words() -> None:
    assert len({scenario.summary for scenario in SCENARIOS.values()}) == len(SCENARIOS) >= 13
    assert len({repr(scenario.plan(arithmetic_prompts)) for scenario in SCENARIOS.values()}) == len(SCENARIOS)
    assert {scenario.engine for scenario in SCENARIOS.values()} == set(ENGINES)


def test_the_long_prompt_fills_the_cache_but_for_less_than_a_block() -> None:
    assert ENGINES["tight"].arguments["max_model_len"] > LONG_PROMPT
    assert blocks(LONG_PROMPT + 1) == TIGHT_BLOCKS
    assert [len(request.prompt_token_ids) for request in rounds("long-prompt")[0]] == [LONG_PROMPT]


@pytest.mark.parametrize("name", ["chunked-prefill", "long-prompt"])
def test_chunked_prompts_do_not_fit_one_step(name: str) -> None:
    budget = ENGINES[SCENARIOS[name].engine].arguments["max_num_batched_tokens"]
    assert any(len(request.prompt_token_ids) > budget for request in rounds(name)[0])


def test_the_requests_of_preemption_fit_together_at_first_and_not_at_the_end() -> None:
    (requests,) = rounds("preemption")
    usable = ENGINES["tight"].arguments["num_gpu_blocks_override"] - 1
    assert len(requests) <= ENGINES["tight"].arguments["max_num_seqs"]
    assert sum(blocks(len(request.prompt_token_ids)) for request in requests) <= usable
    assert sum(blocks(length(request)) for request in requests) > usable


def test_prefix_hits_share_whole_blocks_with_the_first_call_and_leave_them_as_named() -> None:
    for name, aligned in (("prefix-hit", True), ("prefix-hit-unaligned", False)):
        assert ENGINES[SCENARIOS[name].engine].arguments["enable_prefix_caching"] is True
        (first,), again = rounds(name)
        for request in again:
            pairs = zip(first.prompt_token_ids, request.prompt_token_ids, strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(first.prompt_token_ids))
            assert shared >= BLOCK_SIZE
            assert (shared % BLOCK_SIZE == 0) is aligned, name


def test_generated_tokens_cross_a_block_boundary() -> None:
    for request in rounds("generated-tokens")[0]:
        assert request.include_output_tokens
        assert blocks(len(request.prompt_token_ids)) < blocks(length(request) - 1)


def test_some_scenario_samples_and_some_asks_for_several_samples() -> None:
    sampling = {name: [request.sampling for request in rounds(name)[0]] for name in SCENARIOS}
    assert all(options["n"] == 3 and options["temperature"] > 0 for options in sampling["several-samples"])
    assert all(options["temperature"] > 0 for options in sampling["sampling"])
    # Without its own seed a run could not be repeated.
    seeded = sampling["several-samples"] + sampling["sampling"]
    assert len({options["seed"] for options in seeded}) == len(seeded)


@pytest.mark.parametrize("num_hidden_layers", [1, 2, 3, 6, 30])
def test_the_layers_of_every_engine_exist_in_models_of_any_depth(num_hidden_layers: int) -> None:
    allowed = range(-num_hidden_layers - 1, num_hidden_layers + 1)
    for settings in ENGINES.values():
        assert set(settings.layers(num_hidden_layers)) <= set(allowed)
    assert usual_layers(num_hidden_layers)[0] == 0
    assert usual_layers(num_hidden_layers)[-1] == num_hidden_layers


def test_any_order_is_out_of_order_and_has_a_layer_twice() -> None:
    layers = [layer % 7 for layer in ENGINES["any-order"].layers(6)]
    assert layers != sorted(layers)
    assert len(set(layers)) < len(layers)
    assert ENGINES["any-order"].own_layers
    assert list(ENGINES["every-layer"].layers(6)) == list(range(7))
