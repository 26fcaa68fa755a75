# SPDX-License-Identifier: Apache-2.0
# The code of the predictable model, in plain torch: the engine computes it, the harness expects it.
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Channel c holds part c % 7 of the code: 0 the layer id, 1-3 the position and 4-6 the token id in base 256, low digit
# first. Each further group of seven repeats the code with its digits moved by SHIFT, so that moved channels show.
NUM_PARTS = 7
FIRST_TOKEN_PART = 4
BASE = 256  # integers up to 256 are exact in bf16, the coarsest dtype
SHIFT = 37
# The next token is one of these successors of the last: (MULTIPLIER * token + INCREMENT + j * STRIDE) mod vocab_size.
# An odd multiplier permutes a power of two, so different tokens never meet.
MULTIPLIER, INCREMENT, STRIDE = 1229, 7, 997
SUCCESSOR_LOGITS = (4.0, 3.0, 3.0, 3.0)
FORBIDDEN_LOGIT = -1e4


@dataclass(frozen=True)
class Place:
    """What one row says about itself."""

    layer_id: int
    position: int
    token_id: int


def encode(
    layer_id: int,
    # [num_tokens]
    positions: torch.Tensor,
    # [num_tokens]
    token_ids: torch.Tensor,
    hidden_size: int,
) -> torch.Tensor:
    """Code `[num_tokens, hidden_size]`, int64, every value in 0..255."""
    parts = [torch.full_like(positions, layer_id)]
    parts += [positions // BASE**digit for digit in range(3)]
    parts += [token_ids // BASE**digit for digit in range(3)]
    channels = torch.arange(hidden_size, device=positions.device)
    # [num_tokens, NUM_PARTS] -> [num_tokens, hidden_size]
    return (torch.stack(parts, dim=1).long()[:, channels % NUM_PARTS] + SHIFT * (channels // NUM_PARTS)) % BASE


def expected(token_ids: torch.Tensor, layer_ids: Sequence[int], hidden_size: int) -> torch.Tensor:
    """What a record of these tokens must hold: `[num_tokens, num_layers, hidden_size]`, int64."""
    positions = torch.arange(len(token_ids))
    return torch.stack([encode(layer, positions, token_ids, hidden_size) for layer in layer_ids], dim=1)


def decode(row: torch.Tensor) -> Place | None:
    """Place that a row `[hidden_size]` claims, None when it is not a code at all."""
    digits = row[:NUM_PARTS].double().nan_to_num(-1, -1, -1).long().tolist()
    if min(digits) < 0 or max(digits) >= BASE:
        return None
    layer_id, *rest = digits
    position = sum(digit * BASE**power for power, digit in enumerate(rest[:3]))
    token_id = sum(digit * BASE**power for power, digit in enumerate(rest[3:]))
    code = encode(layer_id, torch.tensor([position]), torch.tensor([token_id]), len(row))[0]
    return Place(layer_id, position, token_id) if torch.equal(code.to(row.dtype), row.cpu()) else None


def embed(
    input_ids: torch.Tensor, positions: torch.Tensor, hidden_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Code of layer 0, split into hidden states (token parts) and residual (the rest): `[num_tokens, hidden_size]`."""
    code = encode(0, positions.long(), input_ids.long(), hidden_size).to(dtype)
    is_token = torch.arange(hidden_size, device=code.device) % NUM_PARTS >= FIRST_TOKEN_PART
    zero = torch.zeros((), dtype=dtype, device=code.device)
    return torch.where(is_token, code, zero), torch.where(is_token, zero, code)


def with_layer_id(residual: torch.Tensor, layer_id: int) -> torch.Tensor:
    """The residual `[num_tokens, hidden_size]` with its layer-id channels set to `layer_id`."""
    channels = torch.arange(residual.shape[1], device=residual.device)
    value = ((layer_id + SHIFT * (channels // NUM_PARTS)) % BASE).to(residual.dtype)
    return torch.where(channels % NUM_PARTS == 0, value, residual)


def successors(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Tokens that may follow, likeliest first: `[num_tokens, 4]`, int64."""
    first = MULTIPLIER * token_ids.long() + INCREMENT
    steps = STRIDE * torch.arange(len(SUCCESSOR_LOGITS), device=token_ids.device)
    return (first[:, None] + steps) % vocab_size


def next_logits(hidden_states: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]`, fp32, read from the token digits of states `[num_tokens, hidden_size]`."""
    digits = hidden_states[:, FIRST_TOKEN_PART:NUM_PARTS].float().long()
    token_ids = (digits * BASE ** torch.arange(3, device=digits.device)).sum(dim=1)
    logits = torch.full((len(token_ids), vocab_size), FORBIDDEN_LOGIT, device=digits.device)
    values = torch.tensor(SUCCESSOR_LOGITS, device=digits.device).expand(len(token_ids), -1)
    return logits.scatter_(1, successors(token_ids, vocab_size), values)
