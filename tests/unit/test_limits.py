# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ehs.verify.limits import LIMITS, Limit, find_limit
from ehs.verify.metrics import Comparison, compare, rms, ulp
from ehs.verify.reference import Baseline, Reference

# No token twice: a shifted row must differ at layer 0, too.
PROMPT = [3, 41, 7, 0, 63, 12, 36, 30, 55, 9, 21, 48]
ROWS = [pytest.param(limit, id=f"{limit.model}-{limit.dtype}") for limit in LIMITS]


class TinyModel:
    """A random Llama: what a right engine records, and what is allowed."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.truth = Reference(self.folder, "float32")
        self.reduced: dict[str, Reference] = {"float32": self.truth}
        self.own: dict[str, torch.Tensor] = {}

    def in_dtype(self, dtype: str) -> Reference:
        if dtype not in self.reduced:
            self.reduced[dtype] = Reference(self.folder, dtype)
        return self.reduced[dtype]

    def record(self, dtype: str) -> torch.Tensor:
        """States of layers 0..N as an engine rounds them: with noise that no run of the baseline has seen."""
        seed = None if dtype == "float32" else 1000
        return self.in_dtype(dtype).run(PROMPT, seed=seed).to(getattr(torch, dtype)).clone()

    def own_error(self, dtype: str) -> torch.Tensor | None:
        if dtype == "float32":
            return None
        if dtype not in self.own:
            *_, self.own[dtype] = Baseline(self.truth, self.in_dtype(dtype)).own_errors(PROMPT)
        return self.own[dtype]

    def compare(self, states: torch.Tensor, limit: Limit) -> Comparison:
        if limit.rule == "bitwise":
            return compare(states, self.record(limit.dtype).float(), limit)
        return compare(states, self.truth.states(PROMPT), limit, self.own_error(limit.dtype))


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> TinyModel:
    return TinyModel(tiny_llama)


def shifted_layers(states: torch.Tensor) -> torch.Tensor:
    # The mildest bug there is: neighbours in the residual stream differ by one layer's output.
    return torch.cat([states[:, :1], states[:, :-1]], dim=1)


def shifted_tokens(states: torch.Tensor) -> torch.Tensor:
    return states.roll(1, dims=0)


def without_last_layer_of_each_token_but_the_last(states: torch.Tensor) -> torch.Tensor:
    wrong = states.clone()
    wrong[:-1, -1] = states[:-1, -2]
    return wrong


FAULTS: list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = [
    (shifted_layers, lambda excess: excess[:, 1:]),
    (shifted_tokens, lambda excess: excess[1:]),
    (without_last_layer_of_each_token_but_the_last, lambda excess: excess[:-1, -1]),
]


@pytest.mark.parametrize("limit", ROWS)
def test_a_right_record_is_within_every_limit(model: TinyModel, limit: Limit) -> None:
    assert model.compare(model.record(limit.dtype), limit).excess.max() <= 1


@pytest.mark.parametrize("limit", ROWS)
@pytest.mark.parametrize(("fault", "wrong_part"), FAULTS, ids=lambda item: getattr(item, "__name__", ""))
def test_every_row_that_a_fault_touches_is_beyond_every_limit(
    model: TinyModel,
    limit: Limit,
    fault: Callable[[torch.Tensor], torch.Tensor],
    wrong_part: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    excess = model.compare(fault(model.record(limit.dtype)), limit).excess
    # Room to spare, so that a limit cannot be loosened by a factor without failing here.
    room = {"bitwise": torch.inf, "relative": 1000.0, "baseline": 2.0}[limit.rule]
    assert wrong_part(excess).min() >= room


@pytest.mark.parametrize("limit", [row for row in ROWS if row.values[0].rule == "bitwise"])  # type: ignore[union-attr]
def test_one_number_off_by_one_ulp_breaks_a_bitwise_limit(model: TinyModel, limit: Limit) -> None:
    states = model.record(limit.dtype)
    states[5, 2, 30] = torch.nextafter(states[5, 2, 30], torch.full_like(states[5, 2, 30], 100.0))
    excess = model.compare(states, limit).excess
    assert (excess > 1).nonzero().tolist() == [[5, 2]]


@pytest.mark.parametrize(("name", "error"), [("tiny-llama", 1.1e-5), ("some/model", 1.1e-4)])
def test_fp32_limits_are_not_loosened_in_silence(model: TinyModel, name: str, error: float) -> None:
    states = model.truth.states(PROMPT) * (1 + error)
    assert (model.compare(states, find_limit(name, "float32")).excess > 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_limits_allow_three_times_the_own_error_and_one_ulp_and_no_more(
    model: TinyModel, dtype: str
) -> None:
    own_error = model.own_error(dtype)
    assert own_error is not None
    reference = model.truth.states(PROMPT)
    # fp32 numbers, so that the error is the one asked for; the rule takes its ulp from the record's dtype.
    floor = ulp(rms(reference.double()), torch.float32)
    for factor, fails in ((3.1, True), (2.9, False)):
        error = factor * own_error + 2 * floor
        comparison = compare((reference.double() + error[..., None]), reference, find_limit("x", dtype), own_error)
        somewhere = own_error > 100 * floor
        assert somewhere[:, 1:].all()
        assert ((comparison.excess > 1) == fails)[somewhere].all()


def test_this_project_s_models_come_before_the_row_for_any() -> None:
    assert find_limit("predictable", "float32").rule == "bitwise"
    assert find_limit("predictable", "bfloat16").rule == "bitwise"
    assert find_limit("predictable", "float16").rule == "bitwise"
    assert find_limit("tiny-llama", "float32").value < find_limit("Qwen/Qwen3-8B", "float32").value


def test_a_dtype_without_a_limit_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"dtype='float8'.* bfloat16, float16, float32"):
        find_limit("predictable", "float8")


def test_every_limit_says_where_its_number_comes_from() -> None:
    for limit in LIMITS:
        assert len(limit.reason) > 20
        assert " " in limit.source, f"{limit.model} {limit.dtype}: {limit.source}"
        assert (limit.value == 0) == (limit.rule == "bitwise")
