# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ehs import store
from ehs.engine.plan import Outcome, RequestSpec
from ehs.models import code
from ehs.verify.judge import Expectation, Judge, Verdict
from ehs.verify.limits import Limit, find_limit
from ehs.verify.prompts import arithmetic_prompts
from ehs.verify.reference import Baseline, PredictableReference

HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE = 32, 4, 4096
LAYER_IDS = (3, 0)
SaveRecord = Callable[..., Path]


def greedy(token: int, length: int) -> list[int]:
    tokens = [token]
    while len(tokens) <= length:
        tokens.append(int(code.successors(torch.tensor(tokens[-1:]), VOCAB_SIZE)[0, 0]))
    return tokens[1:]


class Desk:
    """Two requests of the predictable model, their records on disk, and a judge."""

    def __init__(self, folder: Path, save_record: SaveRecord) -> None:
        self.save_record = save_record
        self.judge = Judge(
            find_limit("predictable", "float32"),
            PredictableReference(HIDDEN_SIZE, NUM_LAYERS),
            predictable_vocab_size=VOCAB_SIZE,
        )
        self.expected = []
        for index, (length, outputs) in enumerate(((5, False), (7, True))):
            prompt = arithmetic_prompts(index, length)
            self.expected.append(
                Expectation(
                    f"request {index}",
                    RequestSpec(prompt_token_ids=prompt, sampling={"temperature": 0.0}, include_output_tokens=outputs),
                    Outcome(
                        request=index,
                        sample=0,
                        output_token_ids=greedy(prompt[-1], 3),
                        path=str(folder / f"{index}.safetensors"),
                        num_cached_tokens=0,
                    ),
                    LAYER_IDS,
                    "float32",
                )
            )
            self.save(index, self.states(index))

    def states(self, index: int, layer_ids: Sequence[int] = LAYER_IDS) -> torch.Tensor:
        return code.expected(torch.tensor(self.expected[index].token_ids), layer_ids, HIDDEN_SIZE).float()

    def save(self, index: int, states: torch.Tensor, token_ids: list[int] | None = None, **metadata: str) -> None:
        tokens = torch.tensor(token_ids or self.expected[index].token_ids)
        known = {"layer_ids": str(list(LAYER_IDS))} | metadata
        self.save_record(Path(self.expected[index].outcome.path or ""), states, tokens, **known)

    def verdict(self) -> Verdict:
        verdict = Verdict()
        for expected in self.expected:
            self.judge.judge(expected, verdict, self.expected)
        return verdict

    def problem(self) -> str:
        (problem,) = self.verdict().problems
        return problem


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_record: SaveRecord) -> Desk:
    def at_once(path: Path, *, timeout: float) -> store.HiddenStates:
        assert timeout > 0
        return store.read_hidden_states(path, timeout=0)

    monkeypatch.setattr("ehs.verify.judge.read_hidden_states", at_once)
    return Desk(tmp_path, save_record)


def test_right_records_pass_and_everything_in_them_is_counted(desk: Desk) -> None:
    verdict = desk.verdict()
    assert verdict.problems == []
    # The second record holds the two generated tokens that went through the model.
    assert (verdict.num_records, verdict.num_values) == (2, (5 + 7 + 2) * 2 * HIDDEN_SIZE)
    assert verdict.worst is not None
    assert verdict.worst.excess == 0
    assert {layer: error.excess for layer, error in verdict.layer_errors.items()} == {3: 0, 0: 0}


def test_swapped_rows_are_named_by_both_places(desk: Desk) -> None:
    states = desk.states(0)
    desk.save(0, states[[0, 2, 1, 3, 4]])
    problem = desk.problem()
    prompt = desk.expected[0].token_ids
    assert problem.startswith(f"request 0, token 1 (id {prompt[1]}), layer id 3: channel ")
    assert f"the row says it is layer id 3, position 2, token id {prompt[2]} of request 0" in problem
    assert "(2 of 5 tokens wrong, layer ids [0, 3])" in problem


def test_swapped_requests_are_named_by_the_owner_of_the_rows(desk: Desk) -> None:
    desk.save(0, desk.states(1)[:5])
    problem = desk.problem()
    assert problem.startswith("request 0, token 0 ")
    assert f"position 0, token id {desk.expected[1].token_ids[0]} of request 1" in problem
    assert "(5 of 5 tokens wrong" in problem


def test_a_shifted_layer_is_named_by_the_layer_that_was_captured(desk: Desk) -> None:
    desk.save(1, desk.states(1, (2, 0)))
    problem = desk.problem()
    assert problem.startswith("request 1, token 0 ")
    assert ", layer id 3: channel 0 is 2, expected 3; the row says it is layer id 2, position 0" in problem
    assert "(9 of 9 tokens wrong, layer ids [3])" in problem


def test_layers_in_another_order_than_the_file_claims_are_found(desk: Desk) -> None:
    desk.save(0, desk.states(0, (0, 3)))
    assert "layer id 3: channel 0 is 0, expected 3; the row says it is layer id 0" in desk.problem()


def test_a_row_that_was_never_written_is_found_and_claims_nothing(desk: Desk) -> None:
    states = desk.states(1)
    states[8] = 0
    desk.save(1, states)
    problem = desk.problem()
    assert problem.startswith(f"request 1, token 8 (id {desk.expected[1].token_ids[8]}), layer id ")
    assert "the row says" not in problem


def test_one_wrong_number_is_named_with_both_values(desk: Desk) -> None:
    states = desk.states(0)
    wanted = float(states[4, 1, 17])
    states[4, 1, 17] += 0.5
    desk.save(0, states)
    problem = desk.problem()
    assert f"request 0, token 4 (id {desk.expected[0].token_ids[4]}), layer id 0: channel 17" in problem
    assert f"is {wanted + 0.5:g}, expected {wanted:g}" in problem
    assert "(1 of 5 tokens wrong, layer ids [0])" in problem


def test_what_is_not_finite_is_a_problem_with_its_place(desk: Desk) -> None:
    states = desk.states(0)
    states[2, 1, 3] = float("nan")
    desk.save(0, states)
    assert "not finite at token 2, column 1, channel 3" in desk.problem()


def test_states_under_the_wrong_tokens_are_a_problem(desk: Desk) -> None:
    tokens = list(desk.expected[0].token_ids)
    tokens[3] += 1
    desk.save(0, desk.states(0), tokens)
    assert desk.problem() == (
        f"request 0: token ids differ first at index 3: {tokens[3]}, expected {desk.expected[0].token_ids[3]}"
    )


def test_a_record_that_ends_too_early_is_a_problem(desk: Desk) -> None:
    desk.save(1, desk.states(1)[:7], desk.expected[1].token_ids[:7])
    assert desk.problem() == "request 1: token ids are 7, expected 9"


@pytest.mark.parametrize(("layer_ids", "index"), [("[0, 3]", 0), ("[3, 1]", 1)])
def test_other_layer_ids_than_asked_for_are_a_problem(desk: Desk, layer_ids: str, index: int) -> None:
    desk.save(0, desk.states(0), layer_ids=layer_ids)
    assert f"request 0: layer ids differ first at index {index}" in desk.problem()


def test_a_record_in_another_dtype_is_a_problem_though_every_number_is_right(desk: Desk) -> None:
    desk.save(0, desk.states(0).bfloat16())
    assert desk.problem() == "request 0: dtype bfloat16, expected float32"


def test_a_missing_record_is_a_problem(desk: Desk) -> None:
    Path(desk.expected[1].outcome.path or "").unlink()
    problem = desk.problem()
    assert problem.startswith("request 1: ")
    assert "no record" in problem
    assert desk.verdict().num_records == 1


def test_a_failed_write_is_a_problem_with_its_reason(desk: Desk) -> None:
    path = Path(desk.expected[1].outcome.path or "")
    path.unlink()
    store.write_error(path, "OSError: disk full")
    assert "request 1: " in desk.problem()
    assert "disk full" in desk.problem()


def test_an_output_without_a_record_is_a_problem(desk: Desk) -> None:
    outcome = desk.expected[0].outcome.model_copy(update={"path": None})
    desk.expected[0] = replace(desk.expected[0], outcome=outcome)
    assert desk.problem() == "request 0: the output names no record"


def test_a_wrong_generated_token_is_named_with_what_should_follow(desk: Desk) -> None:
    outputs = list(desk.expected[0].outcome.output_token_ids)
    outputs[1] += 1
    outcome = desk.expected[0].outcome.model_copy(update={"output_token_ids": outputs})
    desk.expected[0] = replace(desk.expected[0], outcome=outcome)
    assert desk.problem() == (
        f"request 0: generated token 1 is {outputs[1]}, token {outputs[0]} is followed by [{outputs[1] - 1}]"
    )


@pytest.mark.parametrize(("rank", "passes"), [(0, True), (3, True), (4, False)])
def test_at_a_temperature_any_successor_may_be_sampled_and_no_other_token(
    desk: Desk, *, rank: int, passes: bool
) -> None:
    prompt = desk.expected[0].spec.prompt_token_ids
    following = code.successors(torch.tensor(prompt[-1:]), VOCAB_SIZE)[0].tolist()
    token = [*following, sum(following) % VOCAB_SIZE][rank]
    assert (token in following) is passes
    expected = desk.expected[0]
    desk.expected[0] = replace(
        expected,
        spec=expected.spec.model_copy(update={"sampling": {"temperature": 1.0}}),
        outcome=expected.outcome.model_copy(update={"output_token_ids": [token]}),
    )
    assert (desk.verdict().problems == []) is passes


def test_the_greatest_error_of_all_records_is_kept(desk: Desk) -> None:
    reference = PredictableReference(HIDDEN_SIZE, NUM_LAYERS)
    desk.judge = Judge(Limit("any", "float32", "relative", 0.5, "", ""), reference)
    for index, factor in ((0, 1.25), (1, 1.0625)):
        states = desk.states(index)
        states[index, 1] *= factor
        desk.save(index, states)
    verdict = desk.verdict()
    assert verdict.problems == []
    assert verdict.worst is not None
    assert (verdict.worst.request, verdict.worst.token, verdict.worst.layer_id) == ("request 0", 0, 0)
    assert [verdict.worst.error, verdict.worst.excess] == pytest.approx([0.25, 0.5])
    assert verdict.layer_errors[0].error == pytest.approx(0.25)
    assert verdict.layer_errors[3].error == 0


class FakeBaseline:
    """Own errors that grow with each run, and a count of the runs."""

    def __init__(self, *errors: float) -> None:
        self.errors = errors
        self.num_runs = 0

    def own_errors(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        for error in self.errors:
            self.num_runs += 1
            yield torch.full((len(token_ids), NUM_LAYERS + 1), error, dtype=torch.float64)


@pytest.mark.parametrize(("errors", "num_runs", "passes"), [((9, 99), 1, True), ((1, 9), 2, True), ((1, 2), 2, False)])
def test_the_baseline_is_run_until_it_explains_the_error_and_a_greater_error_fails(
    desk: Desk, *, errors: tuple[float, ...], num_runs: int, passes: bool
) -> None:
    baseline: Any = FakeBaseline(*errors)
    reference = PredictableReference(HIDDEN_SIZE, NUM_LAYERS)
    desk.judge = Judge(Limit("any", "float32", "baseline", 2.0, "", ""), reference, baseline)
    del desk.expected[1]
    desk.save(0, desk.states(0) + 10)
    verdict = desk.verdict()
    assert baseline.num_runs == num_runs
    assert (verdict.problems == []) is passes
    assert verdict.worst is not None
    assert verdict.worst.excess == pytest.approx(10 / (2 * errors[num_runs - 1]), rel=1e-4)


def test_the_baseline_is_read_at_the_layers_of_the_record(desk: Desk) -> None:
    class OnlyLayerThree(FakeBaseline):
        def own_errors(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
            for errors in super().own_errors(token_ids):
                errors[:, 3] = 100
                yield errors

    baseline: Any = OnlyLayerThree(0.0)
    assert hasattr(Baseline, "own_errors")
    reference = PredictableReference(HIDDEN_SIZE, NUM_LAYERS)
    desk.judge = Judge(Limit("any", "float32", "baseline", 2.0, "", ""), reference, baseline)
    desk.save(0, desk.states(0) + 10)
    assert desk.problem().endswith("(5 of 5 tokens wrong, layer ids [0])")


def test_a_record_of_another_hidden_size_is_a_problem(desk: Desk) -> None:
    desk.save(0, desk.states(0)[..., :-1])
    assert "request 0" in desk.problem()
