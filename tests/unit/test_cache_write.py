# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ehs.engine.cache_write import write_hidden_states

CANARY = -77.0
NUM_BLOCKS = 6


@dataclass(frozen=True)
class Case:
    """One step: what the model captured, where it goes, and a cache full of canaries."""

    aux: list[torch.Tensor]
    cache: torch.Tensor
    slots: torch.Tensor
    sources: list[int]


def make_cache(
    num_layers: int, block_size: int, hidden_size: int, dtype: torch.dtype, *, token_major: bool
) -> torch.Tensor:
    if token_major:
        memory = torch.full((NUM_BLOCKS, block_size, num_layers, hidden_size), CANARY, dtype=dtype)
        return memory.permute(0, 2, 1, 3)
    return torch.full((NUM_BLOCKS, num_layers, block_size, hidden_size), CANARY, dtype=dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size, hidden_size = draw(st.sampled_from([1, 2, 5, 16])), draw(st.integers(1, 9))
    num_captured = draw(st.integers(1, 4))
    sources = draw(st.lists(st.integers(0, num_captured - 1), min_size=1, max_size=5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    # Block 0 is never given to a request.
    free = range(block_size, NUM_BLOCKS * block_size)
    mapped = draw(st.lists(st.sampled_from(free), unique=True, max_size=12))
    slots = list(mapped)
    for _ in range(draw(st.integers(0, 3))):
        slots.insert(draw(st.integers(0, len(slots))), -1)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    wide = torch.randn((num_captured, hidden_size, len(slots), 2), generator=generator).to(dtype)
    if draw(st.booleans()):
        # Views as a model hands them over: transposed, and every other number of something wider.
        aux = [layer[:, :, 0].T for layer in wide]
    else:
        aux = [layer[:, :, 0].T.contiguous() for layer in wide]
    cache = make_cache(len(sources), block_size, hidden_size, dtype, token_major=draw(st.booleans()))
    index_dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return Case(aux, cache, torch.tensor(slots, dtype=index_dtype), sources)


@given(cases())
def test_each_slot_gets_its_token_from_the_layer_of_each_column_and_nothing_else_changes(case: Case) -> None:
    block_size = case.cache.shape[2]
    wanted = case.cache.clone()
    for token, slot in enumerate(case.slots.tolist()):
        if slot >= 0:
            for column, source in enumerate(case.sources):
                wanted[slot // block_size, column, slot % block_size] = case.aux[source][token]
    aux_before = [layer.clone() for layer in case.aux]

    write_hidden_states(case.aux, case.cache, case.slots, case.sources)

    # Padding may land in the null block, and only there.
    assert torch.equal(case.cache[1:], wanted[1:])
    assert (case.cache[0, :, 1:] == CANARY).all()
    assert all(map(torch.equal, case.aux, aux_before))


def test_infinity_and_nan_are_copied_bit_by_bit() -> None:
    bits = torch.tensor([[0x7F800001, -1, -(2**31), 0x7F800000]], dtype=torch.int32)
    cache = make_cache(1, 2, 4, torch.float32, token_major=True)
    write_hidden_states([bits.view(torch.float32)], cache, torch.tensor([3]), [0])
    assert torch.equal(cache[1, 0, 1].contiguous().view(torch.int32), bits[0])


@pytest.mark.parametrize("wrong", [torch.float64, torch.bfloat16, torch.float16])
def test_nothing_is_cast_silently(wrong: torch.dtype) -> None:
    cache = make_cache(2, 4, 8, torch.float32, token_major=False)
    aux = [torch.zeros(3, 8), torch.zeros(3, 8, dtype=wrong)]
    with pytest.raises(TypeError, match=f"{wrong}, the cache is torch.float32"):
        write_hidden_states(aux, cache, torch.tensor([4, 5, 6]), [0, 1])
    assert (cache == CANARY).all()


@pytest.mark.parametrize("shape", [(2, 8), (4, 8), (3, 7), (3, 1), (1, 8), (3, 8, 1), (3,)])
def test_states_of_another_shape_are_refused_before_anything_is_written(shape: tuple[int, ...]) -> None:
    cache = make_cache(2, 4, 8, torch.float32, token_major=False)
    with pytest.raises(ValueError, match=r"slots and cache want \[3, 8\]"):
        write_hidden_states([torch.zeros(3, 8), torch.zeros(shape)], cache, torch.tensor([4, 5, 6]), [0, 1])
    assert (cache == CANARY).all()


@pytest.mark.parametrize("sources", [[0], [0, 0, 0], []])
def test_another_number_of_columns_than_the_cache_has_is_refused(sources: list[int]) -> None:
    cache = make_cache(2, 4, 8, torch.float32, token_major=True)
    with pytest.raises(ValueError, match="for a cache of 2 layers"):
        write_hidden_states([torch.zeros(3, 8)], cache, torch.tensor([4, 5, 6]), sources)
    assert (cache == CANARY).all()
