"""What a decode benchmark measures: shapes, precision, and the lengths of answers."""

from __future__ import annotations

import math
import random
from typing import Literal

import torch
from msgspec import Struct

from llamarl.config import GeneratorConfig
from llamarl.generate.limits import Precision
from llamarl.model.quantize import FP8, Quantization

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}  # dtypes of the weights
OPERANDS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": FP8,
    "int8": torch.bfloat16,
}  # dtypes of the products
LONGEST = 10  # heavy tail: the longest answer, in medians
_SPREAD = 0.8  # heavy tail: standard deviation of the logarithm of the lengths


class DecodeCase(Struct, frozen=True):
    """What is measured: `batch` sequences with `prompt` and `new` tokens each."""

    model: str
    batch: int
    prompt: int
    new: int
    samples: int  # completions per prompt
    precision: str
    device: str
    kv_cache: Literal["auto", "fp8"] = "auto"
    burst: int = 0
    page_tokens: int = 16
    lora: int = 0  # rank of adapters beside all layers; 0: none
    beside: int = GeneratorConfig().prefill_beside  # prompt tokens that a step reads beside its answers; 0: none

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters, and of everything that is not quantized."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def narrow(self) -> Precision:
        weights: Quantization = "fp8" if self.precision == "fp8" else "int8" if self.precision == "int8" else "none"
        return Precision(weights=weights, kv_cache=self.kv_cache, keep_wide=not self.lora)

    @property
    def num_prompts(self) -> int:
        return -(-self.batch // self.samples)

    @property
    def median(self) -> int:
        """Median of the heavy-tailed lengths, whose mean is then about `new`."""
        return max(1, round(self.new / math.exp(_SPREAD**2 / 2)))

    def heavy_tailed(self, chance: random.Random, longest: int) -> int:
        """A length from the heavy tail, at most `longest`."""
        return min(max(1, round(self.median * math.exp(chance.gauss(0, _SPREAD)))), longest)


class DecodeFigures(Struct, frozen=True):
    """What was measured of a case; rates in tokens per second."""

    rate: float
    rate_with_prefill: float
    heavy_tailed: float
    change_lost_s: float
    windows: int = 0  # 0: everything was run to its end
