# SPDX-License-Identifier: Apache-2.0
# Imports torch only, so that it can be tested and measured where vLLM is not installed.
from collections.abc import Sequence

import torch


def write_hidden_states(
    # num_captured x [num_tokens, hidden_size]
    aux_hidden_states: Sequence[torch.Tensor],
    # [num_blocks, num_layers, block_size, hidden_size]
    cache: torch.Tensor,
    # [num_tokens], -1 where padded
    slot_mapping: torch.Tensor,
    sources: Sequence[int],
) -> None:
    """Write captured states straight into the paged cache, layer by layer, without a copy in between.

    Args:
        aux_hidden_states: one tensor a captured layer, `[num_tokens, hidden_size]`, any strides.
        cache: KV view of the cache-only layer, `[num_blocks, num_layers, block_size, hidden_size]`, any strides.
        slot_mapping: slot of each token in the group's own blocks, `[num_tokens]`; padding is -1 and lands in the null
            block (block 0, never given to a request).
        sources: per cache column, the index in `aux_hidden_states` it comes from.

    Raises:
        TypeError: a tensor's dtype is not the cache's; nothing is cast silently.
        ValueError: the number of columns, tokens or channels does not fit.
    """
    num_tokens, hidden_size = slot_mapping.shape[0], cache.shape[3]
    if len(sources) != cache.shape[1]:
        raise ValueError(f"sources: {len(sources)} columns for a cache of {cache.shape[1]} layers")
    for hidden_states in aux_hidden_states:
        if hidden_states.dtype != cache.dtype:
            raise TypeError(f"aux_hidden_states are {hidden_states.dtype}, the cache is {cache.dtype}")
        if hidden_states.shape != (num_tokens, hidden_size):
            raise ValueError(
                f"aux_hidden_states: {list(hidden_states.shape)}, slots and cache want {[num_tokens, hidden_size]}"
            )
    block_size = cache.shape[2]
    slots = slot_mapping.clamp_min(0).long()
    blocks, offsets = slots // block_size, slots % block_size
    for column, source in enumerate(sources):
        cache[:, column].index_put_((blocks, offsets), aux_hidden_states[source])
