"""Losses: pure functions from a TokenBatch to a scalar and its metrics.

A loss is the sum over its tokens divided by `num_tokens`, the count of the whole update (or over its sequences divided by
`num_sequences`), so that parts of an update add up to exactly the update. A part always holds whole sequences, unless the
loss is marked `@tokenwise`: then it may be cut anywhere, which saves the trainer a second pass over the vocabulary.

Metrics are numbers or scalar tensors. Those whose name ends in `_max` are combined by maximum, all others weighted by
tokens. `ratio` is always pi / mu: the policy being trained over the policy that sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llamarl.algo.batch import TokenBatch
from llamarl.config import AlgoConfig

Loss = Callable[[TokenBatch, AlgoConfig], tuple[Tensor, Mapping[str, Tensor | float]]]

REFERENCE_LOGPROBS = "reference_logprobs"  # the column that a reference policy adds to every rollout
_TOKENWISE = "llamarl_tokenwise"


def tokenwise(loss: Loss) -> Loss:
    """Marks a loss in which no token's term depends on another token of the batch."""
    setattr(loss, _TOKENWISE, True)
    return loss


def is_tokenwise(loss: Loss) -> bool:
    return getattr(loss, _TOKENWISE, False)


@tokenwise
def aipo_loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
    """AIPO: each token's gradient is min(pi / mu, rho) * A * grad log pi, clipped from above only.

    The weight is a constant for the gradient: a token above rho keeps the weight rho and is not dropped, as it would be
    if the clamp were differentiated.
    """
    ratio_N = tokens.ratio_N.detach()
    weight_N = ratio_N.clamp(max=algo.rho)
    loss = -(weight_N * tokens.advantages_N * tokens.policy_logprobs_N).sum() / tokens.num_tokens
    return loss, {"clipped_share": (ratio_N > algo.rho).float().mean()}


@tokenwise
def reinforce_loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
    """REINFORCE: A * grad log pi, as if every token had been sampled by the policy being trained. RLOO is this loss with
    leave-one-out advantages."""
    return -(tokens.advantages_N * tokens.policy_logprobs_N).sum() / tokens.num_tokens, {}


@tokenwise
def ppo_loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
    """PPO's clip, two-sided: min(ratio * A, clip(ratio, 1 - low, 1 + high) * A). A token that has moved far enough in the
    direction it was pulled stops pulling. GRPO is this loss with mean/std advantages."""
    ratio_N = tokens.ratio_N
    bounded_N = ratio_N.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    gain_N = torch.minimum(ratio_N * tokens.advantages_N, bounded_N * tokens.advantages_N)
    return -gain_N.sum() / tokens.num_tokens, {"clipped_share": _share_held(ratio_N, bounded_N, tokens.advantages_N)}


@tokenwise
def cispo_loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
    """CISPO: min(ratio, 1 + high) * A * grad log pi, the weight a constant for the gradient; as in its authors' runs,
    there is no lower bound."""
    ratio_N = tokens.ratio_N.detach()
    weight_N = ratio_N.clamp(max=1 + algo.cispo_high)
    loss = -(weight_N * tokens.advantages_N * tokens.policy_logprobs_N).sum() / tokens.num_tokens
    return loss, {"clipped_share": (ratio_N > 1 + algo.cispo_high).float().mean()}


def gspo_loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
    """GSPO: PPO's clip on whole answers. An answer's ratio is the geometric mean of its tokens' ratios; the loss is the
    mean over answers, so long ones weigh no more than short ones."""
    of_sequence_N, lengths_S = _number_sequences(tokens.sequence_N)
    zeros_S = torch.zeros_like(lengths_S, dtype=tokens.policy_logprobs_N.dtype)
    log_ratio_N = tokens.policy_logprobs_N - tokens.behavior_logprobs_N
    ratio_S = (zeros_S.index_add(0, of_sequence_N, log_ratio_N) / lengths_S).exp()
    advantages_S = zeros_S.index_add(0, of_sequence_N, tokens.advantages_N) / lengths_S
    bounded_S = ratio_S.clamp(1 - algo.gspo_low, 1 + algo.gspo_high)
    gain_S = torch.minimum(ratio_S * advantages_S, bounded_S * advantages_S)
    held_share = _share_held(*(of_S[of_sequence_N] for of_S in (ratio_S, bounded_S, advantages_S)))  # of tokens
    return -gain_S.sum() / tokens.num_sequences, {"clipped_share": held_share, "sequence_ratio_max": ratio_S.max()}


def _number_sequences(sequence_N: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence that each token belongs to, counted from 0, and the length of each sequence."""
    _, of_sequence_N, lengths_S = torch.unique_consecutive(sequence_N, return_inverse=True, return_counts=True)
    return of_sequence_N, lengths_S


def _share_held(ratio: Tensor, bounded: Tensor, advantages: Tensor) -> Tensor:
    """Share of the terms whose gradient the clip stops."""
    return (bounded * advantages < ratio * advantages).float().mean().detach()


LOSSES: dict[str, Loss] = {
    "aipo": aipo_loss,
    "reinforce": reinforce_loss,
    "rloo": reinforce_loss,
    "ppo": ppo_loss,
    "grpo": ppo_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
}


def objective(loss: Loss, tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The value to minimize: the loss, plus the KL to the reference, minus the entropy bonus, each where it has a weight."""
    value, metrics = loss(tokens, algo)
    if algo.reference_kl:
        kl_N = kl_estimate(tokens.columns[REFERENCE_LOGPROBS] - tokens.policy_logprobs_N)
        value = value + algo.reference_kl * kl_N.sum() / tokens.num_tokens
        metrics = {**metrics, "kl_reference": kl_N.mean().detach()}
    if algo.entropy:
        value = value - algo.entropy * tokens.entropy_N.sum() / tokens.num_tokens
    return value, dict(metrics)


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """The k3 estimator r - 1 - log r, with log r = log q - log p of tokens sampled from p: its mean is KL(p || q), and it is
    never negative. Computed as expm1(x) - x, which keeps its precision near zero."""
    return torch.expm1(log_ratio) - log_ratio
