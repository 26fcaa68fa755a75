# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ehs.models.code import (
    NUM_PARTS,
    Place,
    decode,
    embed,
    encode,
    expected,
    next_logits,
    successors,
    with_layer_id,
)

VOCAB_SIZE = 4096
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
places = st.builds(Place, st.integers(0, 255), st.integers(0, 2**24 - 1), st.integers(0, 2**24 - 1))
hidden_sizes = st.integers(2 * NUM_PARTS, 150)


def row(place: Place, hidden_size: int = 128) -> torch.Tensor:
    return encode(place.layer_id, torch.tensor([place.position]), torch.tensor([place.token_id]), hidden_size)[0]


@given(places, hidden_sizes, st.sampled_from(DTYPES))
def test_a_row_says_in_every_dtype_where_it_belongs(place: Place, hidden_size: int, dtype: torch.dtype) -> None:
    code = row(place, hidden_size)
    assert torch.equal(code.to(dtype).long(), code)
    assert decode(code.to(dtype)) == place


@given(places, places)
def test_two_places_differ_in_every_whole_group_of_channels(first: Place, second: Place) -> None:
    groups = 128 // NUM_PARTS
    differ = (row(first) != row(second))[: groups * NUM_PARTS].reshape(groups, NUM_PARTS).any(dim=1)
    assert differ.all() if first != second else not differ.any()


@given(places, st.integers(0, 127), st.integers(1, 255))
def test_one_damaged_number_makes_a_row_no_code(place: Place, channel: int, change: int) -> None:
    code = row(place).float()
    code[channel] = (code[channel] + change) % 256
    assert decode(code) is None


@given(places, st.integers(NUM_PARTS, 128 - NUM_PARTS))
def test_channels_moved_along_the_row_make_it_no_code(place: Place, by: int) -> None:
    code = row(place).float()
    assert decode(code.roll(by)) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 256.0, 3.5, 1e30])
@pytest.mark.parametrize("channel", [0, 3, 6, 50])
def test_a_number_that_is_no_digit_makes_a_row_no_code(value: float, channel: int) -> None:
    code = row(Place(3, 3 + 3 * 256 + 3 * 65536, 3 * 65536)).float()
    code[channel] = value
    assert decode(code) is None


@pytest.mark.parametrize("token", [1, 255, 256, 65536, 4095])
def test_zeros_and_a_constant_are_no_code(token: int) -> None:
    assert decode(torch.zeros(128)) is None
    assert decode(torch.full((128,), float(token % 256))) is None


def test_a_record_is_expected_to_count_positions_from_zero_and_keep_the_order_of_layers() -> None:
    states = expected(torch.tensor([9, 9, 300]), [4, 0, 4], 128)
    says = [[decode(states[token, column].float()) for column in range(3)] for token in range(3)]
    assert says == [
        [Place(layer, position, token) for layer in (4, 0, 4)] for position, token in enumerate((9, 9, 300))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 60_000), st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9))
def test_only_both_halves_of_the_stream_together_are_the_code(
    dtype: torch.dtype, start: int, tokens: list[int]
) -> None:
    input_ids = torch.tensor(tokens, dtype=torch.int32)
    positions = torch.arange(start, start + len(tokens))
    hidden_states, residual = embed(input_ids, positions, 128, dtype)
    assert hidden_states.dtype == residual.dtype == dtype
    code = encode(0, positions, input_ids.long(), 128)
    assert torch.equal((hidden_states + residual).long(), code)
    # A capture point that forgets one half, or counts one twice, shows at every token.
    for half in (hidden_states, residual):
        assert (half.long() != code).any(dim=1).all()
        assert ((hidden_states + residual + half).long() != code).any(dim=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=6), st.integers(0, 5000), st.integers(0, VOCAB_SIZE - 1))
def test_a_layer_leaves_its_own_id_whatever_ran_before_and_touches_nothing_else(
    dtype: torch.dtype, layers: list[int], position: int, token: int
) -> None:
    hidden_states, residual = embed(torch.tensor([token]), torch.tensor([position]), 128, dtype)
    for layer in layers:
        residual = with_layer_id(residual, layer)
    assert decode((hidden_states + residual)[0]) == Place(layers[-1], position, token)


def test_every_token_follows_exactly_one_other_on_the_greedy_path() -> None:
    following = successors(torch.arange(VOCAB_SIZE), VOCAB_SIZE)[:, 0]
    assert following.sort().values.tolist() == list(range(VOCAB_SIZE))
    # A token that repeats the last one would hide an off-by-one.
    assert (following != torch.arange(VOCAB_SIZE)).sum() >= VOCAB_SIZE - 4


def test_the_successors_of_a_token_are_all_different() -> None:
    following = successors(torch.arange(VOCAB_SIZE), VOCAB_SIZE).sort(dim=1).values
    assert (following[:, 1:] != following[:, :-1]).all()
    assert (following >= 0).all()
    assert (following < VOCAB_SIZE).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_lead_to_the_first_successor_and_allow_no_stranger(dtype: torch.dtype) -> None:
    tokens = torch.arange(0, VOCAB_SIZE, 7)
    states = encode(6, tokens // 3, tokens, 128).to(dtype)
    logits = next_logits(states, VOCAB_SIZE)
    allowed = successors(tokens, VOCAB_SIZE)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.argmax(dim=1), allowed[:, 0])
    probabilities = logits.softmax(dim=1)
    assert (probabilities > 0).sum(dim=1).eq(4).all()
    assert (probabilities.gather(1, allowed) > 0.1).all()


def test_a_wrong_row_leads_to_another_token() -> None:
    states = encode(6, torch.tensor([3, 4]), torch.tensor([10, 11]), 128).float()
    right, wrong = next_logits(states, VOCAB_SIZE).argmax(dim=1).tolist()
    assert right != wrong
