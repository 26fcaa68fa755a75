# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ehs.verify.limits import Limit, Rule
from ehs.verify.metrics import compare, rms, ulp

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def limit(rule: Rule, value: float = 0.0) -> Limit:
    return Limit("any", "float32", rule, value, "a test", "a test")


def test_relative_error_by_hand() -> None:
    # One token, two layers: off by (3, -1) where the truth is (0, 5), and right.
    states = torch.tensor([[[3.0, 4.0], [1.0, 1.0]]])
    reference = torch.tensor([[[0.0, 5.0], [1.0, 1.0]]])
    comparison = compare(states, reference, limit("relative", 0.1))
    assert comparison.relative[0].tolist() == pytest.approx([math.sqrt(10) / 5, 0])
    assert comparison.excess[0].tolist() == pytest.approx([10 * math.sqrt(10) / 5, 0])
    assert comparison.channel[0, 0] == 0
    assert comparison.worst() == (0, 0)


def test_bitwise_allows_no_difference_however_small() -> None:
    reference = torch.ones(2, 2, 3)
    states = reference.clone()
    states[1, 0, 2] = torch.nextafter(states[1, 0, 2], torch.tensor(2.0))
    comparison = compare(states, reference, limit("bitwise"))
    assert comparison.error.tolist() == [[0, 0], [1, 0]]
    assert comparison.excess.tolist() == [[0, 0], [math.inf, 0]]
    assert comparison.worst() == (1, 0)
    assert comparison.channel[1, 0] == 2


def test_bitwise_takes_both_zeros_for_equal() -> None:
    assert compare(torch.tensor([[[-0.0]]]), torch.tensor([[[0.0]]]), limit("bitwise")).excess.max() == 0


def test_a_row_of_zeros_is_compared_by_its_absolute_error() -> None:
    comparison = compare(torch.tensor([[[0.5, 0.0]]]), torch.zeros(1, 1, 2), limit("relative", 1.0))
    assert comparison.relative.item() == pytest.approx(math.sqrt(0.125))


def test_baseline_allows_its_factor_of_the_own_error_and_one_ulp() -> None:
    reference = torch.full((1, 3, 4), 5.0)
    states = reference + torch.tensor([0.0, 0.25, 1.0]).reshape(1, 3, 1)
    own_error = torch.tensor([[0.0, 0.125, 0.0]], dtype=torch.float64)
    comparison = compare(states.bfloat16(), reference, limit("baseline", 2.0), own_error)
    # 5 lies in [4, 8), where bf16 steps by 2**-5.
    assert comparison.allowed[0].tolist() == [2**-5, 2 * 0.125 + 2**-5, 2**-5]
    assert comparison.error[0].tolist() == [0.0, 0.25, 1.0]
    assert comparison.excess[0].tolist() == pytest.approx([0, 0.25 / (0.25 + 2**-5), 32])
    assert comparison.worst() == (0, 2)


def test_the_own_error_counts_where_it_was_made_and_nowhere_else() -> None:
    states, reference = torch.full((2, 2, 4), 1.5), torch.ones(2, 2, 4)
    own_error = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    excess = compare(states, reference, limit("baseline", 3.0), own_error).excess
    assert (excess > 1).tolist() == [[False, True], [True, True]]


@given(st.integers(0, 49), st.integers(0, 3), st.integers(0, 31))
def test_one_wrong_number_among_many_is_found_at_its_place(token: int, column: int, channel: int) -> None:
    reference = torch.ones(50, 4, 32)
    states = reference.clone()
    states[token, column, channel] += 0.01
    comparison = compare(states, reference, limit("relative", 1e-4))
    assert comparison.worst() == (token, column)
    assert int(comparison.channel[token, column]) == channel
    assert (comparison.excess > 1).sum() == 1


def test_equal_excesses_name_the_first_place() -> None:
    states = torch.zeros(3, 2, 1)
    states[1, 1] = states[2, 0] = 1
    assert compare(states, torch.zeros(3, 2, 1), limit("bitwise")).worst() == (1, 1)


def test_errors_do_not_drown_in_the_dtype_of_the_record() -> None:
    # 300 numbers off by 2**-7 each: summed in bf16 or overflowing in fp16, the mean would be wrong.
    reference = torch.ones(1, 1, 300)
    comparison = compare(torch.full((1, 1, 300), 1 + 2**-7).bfloat16(), reference, limit("relative", 1.0))
    assert comparison.relative.item() == pytest.approx(2**-7, rel=1e-12)
    huge = torch.full((1, 1, 3), 1e25)
    assert compare(huge, huge / 2, limit("relative", 1.0)).relative.item() == pytest.approx(1)
    big = torch.full((1, 1, 300), 60000.0)
    assert compare(big.half(), big.half().float() / 2, limit("relative", 1.0)).relative.item() == pytest.approx(1)


@given(st.sampled_from(DTYPES), st.floats(0, 2.0**127, width=32))
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype, value: float) -> None:
    number = torch.tensor(value).to(dtype)
    if not number.isfinite() or number == torch.finfo(dtype).max:
        return
    following = torch.nextafter(number, torch.full_like(number, math.inf))
    assert ulp(number.double(), dtype) == following.double() - number.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", range(-14, 16))
def test_ulp_changes_exactly_at_powers_of_two(dtype: torch.dtype, exponent: int) -> None:
    at = torch.tensor(2.0**exponent, dtype=torch.float64)
    below = torch.nextafter(at.to(dtype), torch.zeros((), dtype=dtype)).double()
    assert ulp(at, dtype) == 2.0**exponent * torch.finfo(dtype).eps
    if exponent > -14:
        assert ulp(below, dtype) == ulp(at, dtype) / 2


def test_rms_by_hand() -> None:
    assert rms(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist() == pytest.approx([math.sqrt(12.5), 0])
