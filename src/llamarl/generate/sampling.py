"""One sampling step as a pure function of logits and counters. `sampling_kernels.py` holds the twins that run on a GPU.

Random numbers follow from (seed, ordinal, sample, position) alone, so a completion does not depend on what else is in the
batch, on which replica drew it, or on how often it was paused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from msgspec.structs import fields
from torch import Tensor

from llamarl.types import Sampling

_MASK = (1 << 63) - 1  # int64 arithmetic wraps around; masking keeps shifts logical
_GOLDEN = 0x1E3779B97F4A7C15
_MIX_1 = 0x3F58476D1CE4E5B9
_MIX_2 = 0x14D049BB133111EB


_Whole = TypeVar("_Whole", int, Tensor)


def _mix(x: _Whole) -> _Whole:
    """SplitMix64's finalizer on 63 bits: every input bit reaches every output bit."""
    x = x & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def seed_state(seed: int) -> int:
    """Start state of a seed. Mixed twice, so that (seed 1, ordinal 2) and (seed 2, ordinal 1) draw different numbers."""
    return _mix(_mix(seed + _GOLDEN))


def uniform_draws(seed: int, ordinals: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each (ordinal, sample, position), as float64."""
    state = torch.full_like(ordinals, seed_state(seed), dtype=torch.int64)
    for counter in (ordinals, samples, positions):
        state = _mix(state + _mix(counter.to(torch.int64) + _GOLDEN))
    return (state >> 10).to(torch.float64) / (1 << 53)


SamplingColumns = Mapping[str, Tensor]  # `Sampling` of many rows: one column for each of its fields, by name
SAMPLING_DTYPES = {
    field.name: torch.int64 if isinstance(field.default, int) else torch.float32 for field in fields(Sampling)
}


def sample_tokens(
    logits_BV: Tensor, draws_B: Tensor, sampling: SamplingColumns, *, filtered: bool = False
) -> tuple[Tensor, Tensor]:
    """The next token of every row and its log-prob under the distribution it was drawn from.

    A temperature of 0 takes the likeliest token; its log-prob is that of temperature 1. Unless `filtered`, the filters'
    columns are not read, and every token can be drawn.
    """
    temperature_B = sampling["temperature"]
    greedy_B = temperature_B == 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    if filtered:
        least_B = torch.where(greedy_B, -torch.inf, filter_threshold(scaled_BV, sampling))
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B[:, None], -torch.inf)
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    # The sum may end a hair below 1; scaling the draw by it keeps the last token from being out of reach.
    target_B1 = draws_B[:, None] * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def filter_threshold(scaled_BV: Tensor, sampling: SamplingColumns) -> Tensor:
    """The smallest score of each row that may still be drawn. Tokens with equal scores are kept or dropped together.

    top-k keeps the k likeliest tokens; of these, top-p keeps the fewest likeliest whose probabilities reach p; of these,
    min-p keeps those at least min_p times as likely as the likeliest. 0, 1 and 0 keep everything.
    """
    top_k_B, top_p_B, min_p_B = (sampling[name] for name in ("top_k", "top_p", "min_p"))
    sorted_BV = scaled_BV.sort(dim=-1, descending=True).values
    size = sorted_BV.shape[1]
    by_k_B = sorted_BV.gather(1, (top_k_B.long() - 1).clamp(0, size - 1)[:, None])[:, 0]
    by_k_B = torch.where((top_k_B > 0) & (top_k_B < size), by_k_B, -torch.inf)
    kept_BV = sorted_BV.masked_fill(sorted_BV < by_k_B[:, None], -torch.inf).double().softmax(dim=-1)
    before_BV = kept_BV.cumsum(dim=-1) - kept_BV
    count_B = (before_BV < top_p_B.double()[:, None]).sum(dim=-1).clamp(min=1)
    by_p_B = torch.where(top_p_B < 1, sorted_BV.gather(1, count_B[:, None] - 1)[:, 0], -torch.inf)
    by_min_p_B = sorted_BV[:, 0] + min_p_B.float().log()
    return torch.stack([by_k_B, by_p_B, by_min_p_B]).amax(dim=0)
