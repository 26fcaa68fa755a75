# SPDX-License-Identifier: Apache-2.0
# Errors per token and layer, never a mean alone; the worst one with its place and both values.
from dataclasses import dataclass

import torch

from ehs.verify.limits import Limit


@dataclass(frozen=True)
class Comparison:
    """States of one record against its reference.

    Attributes:
        error: `[num_tokens, num_layers]`, fp64, in the unit of the limit's rule (0 or 1 for bitwise).
        allowed: what the limit allows there, same shape.
        relative: |x - ref| / |ref| per token and layer, same shape; what reports show.
        channel: channel with the largest difference, same shape, int64.
    """

    error: torch.Tensor
    allowed: torch.Tensor
    relative: torch.Tensor
    channel: torch.Tensor

    @property
    def excess(self) -> torch.Tensor:
        """Error as a multiple of what is allowed, `[num_tokens, num_layers]`; more than 1 is a failure."""
        nothing_allowed = torch.where(self.error > 0, torch.inf, 0.0)
        return torch.where(self.allowed > 0, self.error / self.allowed, nothing_allowed)

    def worst(self) -> tuple[int, int]:
        """Token and column of the largest excess, the first one when equal."""
        token, column = divmod(int(self.excess.argmax()), self.excess.shape[1])
        return token, column


def compare(
    # [num_tokens, num_layers, hidden_size]
    states: torch.Tensor,
    # [num_tokens, num_layers, hidden_size], fp32
    reference: torch.Tensor,
    limit: Limit,
    # [num_tokens, num_layers], fp64
    own_error: torch.Tensor | None = None,
) -> Comparison:
    """Compare under one limit.

    Args:
        states: from a record, any dtype, finite.
        reference: the truth in fp32 (for "bitwise": exact in the dtype of `states`).
        limit: rule and number.
        own_error: RMS error of the reference model itself in the dtype of `states`; needed by the rule "baseline".
    """
    x, ref = states.double(), reference.double()
    difference = (x - ref).abs()
    channel = difference.argmax(dim=-1)
    scale = rms(ref)
    relative = rms(difference) / torch.where(scale > 0, scale, 1.0)
    if limit.rule == "bitwise":
        error = (difference != 0).any(dim=-1).double()
        return Comparison(error, torch.zeros_like(error), relative, channel)
    if limit.rule == "relative":
        return Comparison(relative, torch.full_like(relative, limit.value), relative, channel)
    assert own_error is not None
    return Comparison(rms(difference), limit.value * own_error + ulp(scale, states.dtype), relative, channel)


def rms(values: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension."""
    return values.square().mean(dim=-1).sqrt()


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance from `values` (0 or more, fp64) to the next number of `dtype`."""
    info = torch.finfo(dtype)
    exponent = values.clamp_min(info.tiny).log2().floor()
    return info.eps * torch.exp2(exponent)
