"""From the rollouts of one update to tensors: TrainBatch goes into the model, TokenBatch into the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llamarl.algo.advantages import group_advantages
from llamarl.types import Completion, PromptGroup, RolloutGroup, bytes_to_floats, bytes_to_tokens


@dataclass(frozen=True)
class TokenBatch:
    """One entry for each completion token of the update (or of a part of it)."""

    policy_logprobs_N: Tensor  # under the policy being trained; carries the gradient
    behavior_logprobs_N: Tensor  # under whatever sampled the token
    advantages_N: Tensor
    sequence_N: Tensor  # which completion the token belongs to
    num_tokens: int  # of the whole update: the loss is normalised by it, however the update is cut up


@dataclass(frozen=True)
class TrainBatch:
    """Sequences as rows, padded on the right; the N completion tokens as flat vectors beside them."""

    tokens_BT: Tensor
    positions_BT: Tensor
    rows_N: Tensor  # where the hidden state lies that predicts each completion token ...
    columns_N: Tensor
    targets_N: Tensor  # ... and the token it should predict
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    staleness_N: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.targets_N)

    def to(self, device: torch.device) -> TrainBatch:
        return TrainBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def with_policy(self, policy_logprobs_N: Tensor) -> TokenBatch:
        return TokenBatch(
            policy_logprobs_N, self.behavior_logprobs_N, self.advantages_N, self.rows_N, num_tokens=self.num_tokens
        )


def make_batch(groups: Sequence[RolloutGroup], *, version: int, skip_zero_variance: bool = False) -> TrainBatch | None:
    """The batch that turns `version` into the next one; None when no tokens are left to learn from."""
    rows: list[tuple[PromptGroup, Completion, float]] = []
    for group in groups:
        advantages = group_advantages(group.rewards)
        if skip_zero_variance and not any(advantages):
            continue
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            rows.append((group.prompt, rollout.completion, advantage))
    return _to_tensors(rows, version) if rows else None


def _to_tensors(rows: Sequence[tuple[PromptGroup, Completion, float]], version: int) -> TrainBatch:
    prompts = [bytes_to_tokens(prompt.prompt_tokens) for prompt, _, _ in rows]
    answers = [bytes_to_tokens(completion.tokens) for _, completion, _ in rows]
    lengths = np.array([len(answer) for answer in answers])
    starts = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(rows), int((starts + lengths).max())), dtype=np.int64)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : len(prompt) + len(answer)] = answer
    within = np.concatenate([np.arange(length) for length in lengths])
    runs = [run for _, completion, _ in rows for run in completion.versions]
    token_versions = np.repeat([run.version for run in runs], [run.count for run in runs])
    return TrainBatch(
        tokens_BT=torch.from_numpy(tokens),
        positions_BT=torch.arange(tokens.shape[1]).expand(tokens.shape),
        rows_N=torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
        columns_N=torch.from_numpy(np.repeat(starts - 1, lengths) + within),
        targets_N=torch.from_numpy(np.concatenate(answers).astype(np.int64)),
        behavior_logprobs_N=torch.from_numpy(
            np.concatenate([bytes_to_floats(completion.behavior_logprobs) for _, completion, _ in rows]).copy()
        ),
        advantages_N=torch.from_numpy(np.repeat([advantage for _, _, advantage in rows], lengths)).float(),
        staleness_N=torch.from_numpy(version - token_versions),
    )
