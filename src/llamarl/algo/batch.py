"""From the rollouts of one update to the data that is learned from: Documents go into packs, a TokenBatch into the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from llamarl.algo.advantages import TOKEN_ADVANTAGES, estimate_advantages, why_left_out
from llamarl.config import AlgoConfig
from llamarl.errors import OwnCodeFailed
from llamarl.routes import Routes, route_rows
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
    """One entry for each sampled token of the update, or of a part of it."""

    policy_logprobs_N: Tensor  # under the policy being trained; carries the gradient
    behavior_logprobs_N: Tensor  # under the policy that sampled the token
    advantages_N: Tensor
    sequence_N: Tensor  # the number of the token's completion; the tokens of one lie together
    entropy_N: Tensor  # of the policy at this token; carries the gradient
    num_tokens: int  # of the whole update: the loss is divided by it, however the update is cut up
    num_sequences: int  # of the whole update
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # values per token that other roles added, by name

    @property
    def ratio_N(self) -> Tensor:
        """pi / mu: probability under the policy being trained, over that under the policy that sampled the token."""
        return (self.policy_logprobs_N - self.behavior_logprobs_N).exp()


@dataclass(frozen=True)
class Streams:
    """The terms of the loss that a document's tokens are in (`streams.py`)."""

    policy: bool = True
    imitation: bool = False
    teacher: str = ""  # name of the teacher; empty: none
    value: bool = False


POLICY = Streams()
IMITATION = Streams(policy=False, imitation=True)
VALUE = Streams(policy=False, value=True)


@dataclass(frozen=True)
class Document:
    """A prompt with one completion, and the advantage of each sampled token. `behavior_logprobs`, `staleness`, `advantages`
    and `columns` have one value for each sampled token."""

    tokens: NDArray[np.int32]  # prompt and answer
    num_prompt_tokens: int
    behavior_logprobs: Floats
    staleness: NDArray[np.int64]
    advantages: Floats
    columns: Mapping[str, Floats] = field(default_factory=dict)
    given: tuple[Given, ...] = ()  # tool replies in the answer: the model reads them, and nothing is learned from them
    source: tuple[int, int] = (-1, 0)  # ordinal of its group, and number of the rollout in it
    streams: Streams = POLICY
    routes: Routes | None = (
        None  # experts of all tokens but the last, which the generator never read; None: not recorded
    )

    @property
    def num_answer_tokens(self) -> int:
        """Number of sampled tokens; tool replies excluded."""
        return len(self.tokens) - self.num_prompt_tokens - sum(reply.count for reply in self.given)

    @property
    def places(self) -> NDArray[np.int64]:
        """Positions of the sampled tokens in `tokens`."""
        return self.num_prompt_tokens + sampled_places(len(self.tokens) - self.num_prompt_tokens, self.given)

    @property
    def answer(self) -> NDArray[np.int32]:
        """The sampled tokens."""
        return self.tokens[self.places]


def make_documents(
    groups: Sequence[RolloutGroup], *, version: int, algo: AlgoConfig, sampled_kl: float = 0.0
) -> list[Document]:
    """The documents that update `version` learns from, in the order of the batch; empty when no tokens are left. With
    `sampled_kl`, teachers change the advantages, so what they teach always has a policy gradient."""
    documents: list[Document] = []
    for group in groups:
        advantages = token_advantages(group, algo)
        flat = not any(one.any() for one in advantages)
        _check_written(group)
        streams = _streams(group.prompt, flat=flat and algo.zero_variance == "skip", sampled_kl=bool(sampled_kl))
        for number, (rollout, own) in enumerate(zip(group.rollouts, advantages, strict=True)):
            if not why_left_out(rollout, flat=flat, algo=algo, prompt=group.prompt):
                documents.append(_document_of(group.prompt, rollout, version, own, number, streams))
    return documents


def _check_written(group: RolloutGroup) -> None:
    """Refuses a row of data whose answer is not the data's: some role has changed it on the way."""
    written = group.prompt.written
    if written is not None and any(one.completion.tokens != written.tokens for one in group.rollouts):
        raise OwnCodeFailed(f"group {group.ordinal}: its answer is not the one that the data gives (sft.path)")


def _check_valued(group: RolloutGroup, algo: AlgoConfig) -> None:
    """Refuses answers that no critic has seen, where advantages come from one; there is no other estimate of them."""
    sampled = group.rollouts if algo.advantage == "gae" and group.prompt.written is None else ()
    if any(TOKEN_ADVANTAGES not in rollout.columns for rollout in sampled):
        raise OwnCodeFailed(f"group {group.ordinal}: no critic has given it advantages (algo.advantage=gae)")


def _streams(prompt: PromptGroup, *, flat: bool, sampled_kl: bool) -> Streams:
    if prompt.written is not None:
        return IMITATION
    if prompt.teacher:
        return Streams(policy=sampled_kl or not flat, teacher=prompt.teacher)
    return POLICY


def document_of(prompt: PromptGroup, completion: Completion, *, version: int) -> Document:
    """A completion that is measured, not learned from."""
    return _document_of(prompt, Rollout(completion, 0.0), version, _repeated(0.0, completion))


def token_advantages(group: RolloutGroup, algo: AlgoConfig) -> list[Floats]:
    """One advantage for each sampled token of each rollout: the values that a role has added as a column, else the
    estimator's one value for the whole completion."""
    _check_valued(group, algo)
    estimate = estimate_advantages(group, algo)
    found = [
        _column(rollout, TOKEN_ADVANTAGES)
        if TOKEN_ADVANTAGES in rollout.columns
        else _repeated(advantage, rollout.completion)
        for rollout, advantage in zip(group.rollouts, estimate, strict=True)
    ]
    return found if algo.reward_weight == 1.0 else [np.float32(algo.reward_weight) * one for one in found]


def _repeated(value: float, completion: Completion) -> Floats:
    """The same value for each sampled token."""
    return np.full(completion.num_tokens, value, dtype=np.float32)


def _column(rollout: Rollout, name: str) -> Floats:
    values, count = bytes_to_floats(rollout.columns[name]), rollout.completion.num_tokens
    if len(values) != count:
        raise OwnCodeFailed(f"column '{name}': {len(values)} values for {count} sampled tokens")
    return values


def _document_of(
    prompt: PromptGroup,
    rollout: Rollout,
    version: int,
    advantages: Floats,
    number: int = 0,
    streams: Streams = POLICY,
) -> Document:
    completion, prompt_tokens = rollout.completion, bytes_to_tokens(prompt.prompt_tokens)
    runs = completion.versions
    return Document(
        tokens=np.concatenate([prompt_tokens, bytes_to_tokens(completion.tokens)]),
        num_prompt_tokens=len(prompt_tokens),
        behavior_logprobs=bytes_to_floats(completion.behavior_logprobs),
        staleness=version - np.repeat([run.version for run in runs], [run.count for run in runs]),
        advantages=advantages,
        columns={name: _column(rollout, name) for name in rollout.columns if name != TOKEN_ADVANTAGES},
        given=completion.given,
        source=(prompt.ordinal, number),
        streams=streams,
        routes=_routes(prompt, completion) if completion.routes else None,
    )


def _routes(prompt: PromptGroup, completion: Completion) -> Routes:
    return route_rows(
        completion.routes,
        completion.prompt_routes or prompt.routes,
        num_tokens=len(completion.tokens) // 4,
        num_prompt=len(prompt.prompt_tokens) // 4,
        of=f"group {prompt.ordinal}",
    )
