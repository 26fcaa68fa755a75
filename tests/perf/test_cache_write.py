# SPDX-License-Identifier: Apache-2.0
# Side by side in one process; what counts is the ratio between the rows of a group, never a time.
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ehs.engine.cache_write import write_hidden_states

NUM_LAYERS, HIDDEN_SIZE, BLOCK_SIZE = 4, 4096, 128
Write = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], object]


def straight(aux: list[torch.Tensor], cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_hidden_states(aux, cache, slots, range(NUM_LAYERS))


class Staged:
    """Three passes: gather the layers, copy them into a buffer that lives on, scatter from there."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(4096, NUM_LAYERS, HIDDEN_SIZE, dtype=torch.bfloat16)

    def __call__(self, aux: list[torch.Tensor], cache: torch.Tensor, slots: torch.Tensor) -> None:
        staged = self.buffer[: len(slots)]
        staged.copy_(torch.stack(aux, dim=1))
        cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = staged


def make(num_tokens: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    aux = [torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).bfloat16() for _ in range(NUM_LAYERS)]
    num_blocks = 4096 // BLOCK_SIZE + 1
    # Token-major in memory, as the connector asks for: [num_blocks, block_size, num_layers, hidden_size] seen permuted.
    cache = torch.zeros(num_blocks, BLOCK_SIZE, NUM_LAYERS, HIDDEN_SIZE, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    blocks = torch.randperm(num_blocks - 1, generator=generator) + 1
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens]
    return aux, cache, slots


@pytest.mark.parametrize("num_tokens", [8, 4096])
@pytest.mark.parametrize("way", ["straight", "staged", "plain copy"])
def test_cache_write(benchmark: Any, num_tokens: int, way: str) -> None:
    aux, cache, slots = make(num_tokens)
    payload = torch.stack(aux, dim=1)
    target = torch.empty_like(payload)
    writes: dict[str, Write] = {
        "straight": straight,
        "staged": Staged(),
        "plain copy": lambda *_: target.copy_(payload),
    }
    benchmark.group = f"cache write, {num_tokens} tokens x {NUM_LAYERS} x {HIDDEN_SIZE} bf16"
    benchmark.pedantic(writes[way], args=(aux, cache, slots), rounds=7, warmup_rounds=1)
    num_bytes = payload.numel() * payload.element_size()
    benchmark.extra_info |= {"bytes": num_bytes, "GB/s": num_bytes / benchmark.stats.stats.median / 1e9}
    written = target if way == "plain copy" else cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE]
    assert torch.equal(written, payload)
