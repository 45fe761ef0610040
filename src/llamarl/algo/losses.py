"""Losses: pure functions from a TokenBatch to a scalar and its metrics.

A loss is the sum over its tokens divided by `num_tokens`, the count of the whole update, so that parts of an update add
up to exactly the update. Metrics whose name ends in `_max` are combined by maximum, all others weighted by tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llamarl.algo.batch import TokenBatch
from llamarl.config import Algo

Loss = Callable[[TokenBatch, Algo], tuple[Tensor, dict[str, float]]]


def aipo_loss(tokens: TokenBatch, algo: Algo) -> tuple[Tensor, dict[str, float]]:
    """AIPO: each token's gradient is min(pi / mu, rho) * A * grad log pi, clipped from above only.

    The weight is a constant for the gradient: a token above rho keeps the weight rho and is not dropped, as it would be
    if the clamp were differentiated.
    """
    ratio_N = (tokens.policy_logprobs_N - tokens.behavior_logprobs_N).detach().exp()
    weight_N = ratio_N.clamp(max=algo.rho)
    loss = -(weight_N * tokens.advantages_N * tokens.policy_logprobs_N).sum() / tokens.num_tokens
    return loss, off_policy_metrics(tokens, ratio_N, algo.rho)


@torch.no_grad()
def off_policy_metrics(tokens: TokenBatch, ratio_N: Tensor, rho: float) -> dict[str, float]:
    """How far the policy is from what sampled the tokens. The effective sample size is a share: 1 is on-policy."""
    weight_N = ratio_N.clamp(max=rho)
    return {
        "ratio_mean": ratio_N.mean().item(),
        "ratio_max": ratio_N.max().item(),
        "clipped_share": (ratio_N > rho).float().mean().item(),
        "effective_sample_size": (weight_N.sum() ** 2 / (weight_N**2).sum() / len(weight_N)).item(),
        "kl_behavior": (tokens.behavior_logprobs_N - tokens.policy_logprobs_N).mean().item(),
    }


LOSSES: dict[str, Loss] = {"aipo": aipo_loss}
