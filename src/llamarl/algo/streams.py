"""Streams: the terms of an update's loss. Each has tokens of its own, is divided by their number, and has a weight.

`policy`      the policy gradient of `algo.loss`, on tokens that were sampled
`imitation`   cross-entropy, on tokens of data
`teacher`     KL to another policy, on tokens that were sampled; it may stand beside the policy gradient
`value`       squared error of a critic's values, on tokens that were sampled; a critic has no other stream

An update that has only the first one is what reinforcement learning always was, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llamarl.algo.batch import Document, TokenBatch
from llamarl.algo.losses import Loss, objective
from llamarl.config import AlgoConfig

TEACHER_LOGPROBS = "teacher_logprobs"  # the column that a teacher adds to rollouts where its KL is an advantage


@dataclass(frozen=True)
class StreamCounts:
    """Number of tokens that each stream has in the whole update, and of sequences that the policy gradient has."""

    policy: int = 0
    policy_sequences: int = 0
    imitation: int = 0
    teacher: int = 0
    value: int = 0
    total: int = 0  # a token in two streams counts once

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy has sampled, where it is the policy that learns."""
        return self.total - self.imitation - self.value

    @classmethod
    def of(cls, documents: Iterable[Document]) -> StreamCounts:
        found = [(one.streams, one.num_answer_tokens) for one in documents]
        return cls(
            policy=sum(count for streams, count in found if streams.policy),
            policy_sequences=sum(streams.policy for streams, _ in found),
            imitation=sum(count for streams, count in found if streams.imitation),
            teacher=sum(count for streams, count in found if streams.teacher),
            value=sum(count for streams, count in found if streams.value),
            total=sum(count for _, count in found),
        )


@dataclass(frozen=True)
class StreamWeights:
    """Weight of the streams in the loss; that of the policy gradient is `algo.reward_weight`."""

    imitation: float = 1.0
    sampled_kl: float = 0.0  # weight of the KL to a teacher as an advantage; 0: it is a stream of its own
    value_clip: float = 0.0  # most that an update should move a critic's value; 0: no limit


def policy_stream(
    loss: Loss, tokens: TokenBatch, algo: AlgoConfig, *, sampled_kl: float = 0.0
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The policy gradient with its KL to the reference and its entropy bonus. With `sampled_kl`, the advantage of each token
    gets log q - log p of the teacher q and the policy p: minus the k1 estimate of KL(p || q), whose gradient this is."""
    if not sampled_kl:
        return objective(loss, tokens, algo)
    gain_N = tokens.columns[TEACHER_LOGPROBS] - tokens.policy_logprobs_N.detach()
    taught = replace(tokens, advantages_N=tokens.advantages_N + sampled_kl * gain_N)
    return objective(loss, taught, algo)


def value_stream(
    values_N: Tensor, before_N: Tensor, returns_N: Tensor, *, num_tokens: int, clip: float
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Half the mean squared error of a critic's values. With `clip`, a value that is further than that from the one `before`
    the update is also judged at the limit, and the larger error counts: it has no reason to go further (PPO)."""
    error_N = (values_N - returns_N) ** 2
    if not clip:
        return 0.5 * error_N.sum() / num_tokens, {}
    bounded_N = before_N + (values_N - before_N).clamp(-clip, clip)
    bounded_error_N = (bounded_N - returns_N) ** 2
    held = (bounded_error_N > error_N).float().mean().detach()
    return 0.5 * torch.maximum(error_N, bounded_error_N).sum() / num_tokens, {"value_clipped_share": held}


def imitation_stream(tokens: TokenBatch, weight: float = 1.0) -> Tensor:
    """Cross-entropy: minus the mean log-prob of the data's tokens."""
    return -weight * tokens.policy_logprobs_N.sum() / tokens.num_tokens
