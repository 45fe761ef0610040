"""Whether a generator with fp8 or int8 weights is faster: benchmarks/results/decode.md and docs/results.md, on one H200."""

from __future__ import annotations

from llamarl.families.parameters import num_parameters
from llamarl.model_spec import ModelSpec

_PAYS_FROM = 7e9  # weights; measured are 1.5B, where fp8 is no faster, and 8B, where it is


def narrow_advice(shape: ModelSpec, quantize: str) -> str:
    """One line on why narrow weights will not make this model's generators faster; empty if they will."""
    if quantize == "int8":
        return "int8 generators save memory, not time: measured at 8B, they reach 58% of bf16's rate"
    if quantize == "fp8" and num_parameters(shape) < _PAYS_FROM:
        size = num_parameters(shape) / 1e9
        return (
            f"fp8 generators do not pay below 8B, and this model has {size:.2g}B weights: measured, they are 1.3 to 1.4 "
            "times as fast as bf16 at 8B, and no faster at 1.5B"
        )
    return ""
