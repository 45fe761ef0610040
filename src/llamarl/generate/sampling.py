"""One sampling step, as a pure function of logits and counters.

Random numbers come from (seed, ordinal, sample, position) alone, so a completion does not depend on what else is in the
batch, on which replica drew it, or on how often it was interrupted.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 63) - 1  # int64 arithmetic wraps; masking keeps shifts logical
_GOLDEN = 0x1E3779B97F4A7C15
_MIX_1 = 0x3F58476D1CE4E5B9
_MIX_2 = 0x14D049BB133111EB


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on 63 bits: every input bit reaches every output bit."""
    x = x & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def uniform_draws(seed: int, ordinals: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (ordinal, sample, position), as float64."""
    # Mixed twice, so that seed 1, ordinal 2 and seed 2, ordinal 1 do not meet in the sum below.
    state = _mix(_mix(torch.full_like(ordinals, seed, dtype=torch.int64) + _GOLDEN))
    for counter in (ordinals, samples, positions):
        state = _mix(state + _mix(counter.to(torch.int64) + _GOLDEN))
    return (state >> 10).to(torch.float64) / (1 << 53)


def sample_tokens(logits_BV: Tensor, draws_B: Tensor, temperatures_B: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of every row and its log-prob under the distribution it was drawn from.

    A temperature of 0 takes the likeliest token; its log-prob is that of temperature 1.
    """
    greedy_B = temperatures_B == 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperatures_B)[:, None]
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    # The sum may end a hair below 1; scaling the draw by it keeps the last token from being out of reach.
    target_B1 = draws_B[:, None] * cumulative_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
