"""From the rollouts of one update to what is learned from them: Documents go into packs, a TokenBatch into the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from llamarl.algo.advantages import advantages_for
from llamarl.config import AlgoConfig
from llamarl.types import (
    Completion,
    Given,
    PromptGroup,
    Rollout,
    RolloutGroup,
    bytes_to_floats,
    bytes_to_tokens,
    sampled_places,
)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TokenBatch:
    """One entry for each completion token of the update (or of a part of it)."""

    policy_logprobs_N: Tensor  # under the policy being trained; carries the gradient
    behavior_logprobs_N: Tensor  # under whatever sampled the token
    advantages_N: Tensor
    sequence_N: Tensor  # which completion the token belongs to; its tokens lie together
    entropy_N: Tensor  # of the policy where the token was sampled; carries the gradient
    num_tokens: int  # of the whole update: the loss is normalized by it, however the update is cut up
    num_sequences: int  # likewise
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # values per token that other roles added, by name

    @property
    def ratio_N(self) -> Tensor:
        return (self.policy_logprobs_N - self.behavior_logprobs_N).exp()


@dataclass(frozen=True)
class Document:
    """One completion behind its prompt, and what its tokens are worth."""

    tokens: NDArray[np.int32]  # prompt and answer
    num_prompt_tokens: int
    behavior_logprobs: Floats  # of the answer's sampled tokens, as are the following
    staleness: NDArray[np.int64]
    advantage: float = 0.0
    columns: Mapping[str, Floats] = field(default_factory=dict)
    given: tuple[Given, ...] = ()  # of the answer, what a tool wrote: it is read, and nothing is learned from it

    @property
    def num_answer_tokens(self) -> int:
        """That are learned from."""
        return len(self.tokens) - self.num_prompt_tokens - sum(reply.count for reply in self.given)

    @property
    def places(self) -> NDArray[np.int64]:
        """Where the tokens lie that are learned from."""
        return self.num_prompt_tokens + sampled_places(len(self.tokens) - self.num_prompt_tokens, self.given)

    @property
    def answer(self) -> NDArray[np.int32]:
        return self.tokens[self.places]


def make_documents(groups: Sequence[RolloutGroup], *, version: int, algo: AlgoConfig) -> list[Document]:
    """What update `version` learns from, in the order of the batch; empty when no tokens are left."""
    advantages_of = advantages_for(algo.advantage, algo.loss)
    documents: list[Document] = []
    for group in groups:
        advantages = advantages_of([_worth(rollout, algo) for rollout in group.rollouts])
        if algo.zero_variance == "skip" and not any(advantages):
            continue
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            masked = algo.overlong == "mask" and rollout.completion.truncated
            if rollout.completion.num_tokens and not masked:
                documents.append(_document_of(group.prompt, rollout, version, advantage))
    return documents


def document_of(prompt: PromptGroup, completion: Completion, *, version: int) -> Document:
    """A completion that is measured, not learned from."""
    return _document_of(prompt, Rollout(completion, 0.0), version, 0.0)


def _worth(rollout: Rollout, algo: AlgoConfig) -> float:
    cut_off = algo.overlong == "penalize" and rollout.completion.truncated
    return rollout.reward - algo.overlong_penalty if cut_off else rollout.reward


def _document_of(prompt: PromptGroup, rollout: Rollout, version: int, advantage: float) -> Document:
    completion, prompt_tokens = rollout.completion, bytes_to_tokens(prompt.prompt_tokens)
    runs = completion.versions
    return Document(
        tokens=np.concatenate([prompt_tokens, bytes_to_tokens(completion.tokens)]),
        num_prompt_tokens=len(prompt_tokens),
        behavior_logprobs=bytes_to_floats(completion.behavior_logprobs),
        staleness=version - np.repeat([run.version for run in runs], [run.count for run in runs]),
        advantage=advantage,
        columns={name: bytes_to_floats(data) for name, data in rollout.columns.items()},
        given=completion.given,
    )
