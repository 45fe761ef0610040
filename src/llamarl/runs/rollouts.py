"""The kept rollouts of a run as a reader wants them: texts, aligned arrays, rewards, advantages, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from llamarl.algo.advantages import TOKEN_ADVANTAGES, estimate_advantages, why_left_out
from llamarl.config import Config
from llamarl.errors import InputError
from llamarl.generate.prompting import judged_text
from llamarl.model.tokenizer import Tokenizer
from llamarl.observe.rollout_log import ROLLOUTS, TOKENIZER, GroupPlace, RolloutIndex, SavedGroup
from llamarl.tasks.given_answer import given_answer
from llamarl.types import (
    Completion,
    CompletionGroup,
    PromptGroup,
    Rollout,
    RolloutGroup,
    bytes_to_floats,
    bytes_to_tokens,
    sampled_places,
)

Floats = NDArray[np.float32]
Status = Literal["trained", "left out", "dropped"]


@dataclass(frozen=True)
class AnswerTurn:
    """A stretch of an answer that the model or a tool wrote."""

    role: Literal["model", "tool"]
    text: str


@dataclass(frozen=True, eq=False)
class KeptRollout:
    """One answer. Arrays have an entry for each token; tokens that a tool wrote have version -1 and no log-probs (NaN)."""

    number: int  # place in its group
    text: str  # the whole answer, tool replies included, without special tokens
    turns: tuple[AnswerTurn, ...]  # the answer in parts; one part unless it is a conversation
    tokens: NDArray[np.int32]
    sampled: NDArray[np.bool_]  # whether the model wrote the token
    versions: NDArray[np.int64]  # version of the policy that sampled each token
    behavior_logprobs: Floats  # under the policy that sampled the token
    policy_logprobs: Floats  # under the policy that was trained on it, before that update; NaN: not recorded
    columns: Mapping[str, Floats]  # values that other roles added, such as a reference policy's log-probs
    truncated: bool  # ended by the token limit, not by a stop token
    reward: float  # NaN if the group was dropped before it was scored
    parts: Mapping[str, float]  # what each scorer gave, where several make up the reward
    given: (
        str | None
    )  # the final answer that the scorer found in the text; None: none, or the scorer does not look for one
    advantage: float  # mean over its tokens, where a role gave each token its own
    status: Status
    reason: str  # why it was left out or dropped; empty if it was trained
    sample: int | None = None  # the agent's sample that it is a branch of; None: it is a sample of its own
    player: int = 0  # which player of its sample wrote it, where an agent plays several sides


@dataclass(frozen=True, eq=False)
class KeptGroup:
    """All answers to one prompt, and what became of them."""

    ordinal: int  # identifies the group in the run
    update: int  # the update that trained it, or in whose batch it had its place
    prompt: str  # as the model saw it, special tokens included
    prompt_tokens: NDArray[np.int32]
    answer: str  # that the answers were scored against
    dropped: str  # why the group was dropped; empty: it was trained
    rollouts: tuple[KeptRollout, ...]  # none if it was dropped before it was answered

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of its rollouts, in order; NaN where it was dropped unscored."""
        return tuple(rollout.reward for rollout in self.rollouts)


class RolloutReader:
    """Pages through the kept rollouts of a run folder; reads one group at a time. A run may still be writing: `refresh`
    takes in what it has written since."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder, self._config = folder / ROLLOUTS, config
        self._index = RolloutIndex(self._folder)

    def refresh(self) -> None:
        """Take in what the job has written since."""
        self._index.refresh()

    @property
    def updates(self) -> list[int]:
        """Updates that have rollouts, ascending."""
        return self._index.updates

    @property
    def damage(self) -> list[str]:
        """One line for each part of the index that cannot be read."""
        return self._index.damage

    def num_groups(self, update: int) -> int:
        """Number of groups in the update's batch, whether they were kept or not."""
        row = self._index.get(update)
        return row.num_groups if row else 0

    def places(self, update: int) -> tuple[GroupPlace, ...]:
        """The kept groups of an update, by ordinal, with their rewards, without reading them."""
        row = self._index.get(update)
        return row.groups if row else ()

    def groups(self, update: int, start: int = 0, count: int | None = None) -> Iterator[KeptGroup]:
        """The kept groups of an update, by ordinal: `count` of them from the `start`-th on."""
        stop = None if count is None else start + count
        return (self.read(place) for place in self.places(update)[start:stop])

    def find(self, ordinal: int) -> KeptGroup:
        """The group with this ordinal; InputError if it was not kept."""
        for update in self.updates:
            for place in self.places(update):
                if place.ordinal == ordinal:
                    return self.read(place)
        raise InputError(f"{self._folder}: group {ordinal} is not there; it was not kept, or not trained yet")

    def read(self, place: GroupPlace) -> KeptGroup:
        """Read one group. DamagedGroup if it cannot be."""
        saved = self._index.read(place)
        prompt = saved.group if isinstance(saved.group, PromptGroup) else saved.group.prompt
        tokens = bytes_to_tokens(prompt.prompt_tokens)
        return KeptGroup(
            ordinal=prompt.ordinal,
            update=saved.update,
            prompt=self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False),
            prompt_tokens=tokens,
            answer=prompt.problem.answer,
            dropped=saved.dropped,
            rollouts=tuple(self._rollouts(saved)),
        )

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds. A character that several tokens make up comes with the last of them."""
        stream, backend = DecodeStream(skip_special_tokens=False), self._tokenizer.backend
        return [stream.step(backend, int(token)) or "" for token in tokens]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not (self._folder / TOKENIZER).is_file():
            raise InputError(f"{self._folder / TOKENIZER}: is gone, so rollouts cannot be shown as text")
        return Tokenizer.load(self._folder)

    def _rollouts(self, saved: SavedGroup) -> Iterator[KeptRollout]:
        group, algo = saved.group, self._config.algo
        if isinstance(group, PromptGroup):
            return
        if isinstance(group, CompletionGroup):
            for number, completion in enumerate(group.completions):
                unscored = Rollout(completion, float("nan"))
                yield self._rollout(group.prompt, number, unscored, b"", 0.0, ("dropped", saved.dropped))
            return
        advantages = _advantages(group, self._config)
        flat = not any(one.any() for one in advantages)
        for number, rollout in enumerate(group.rollouts):
            reason = saved.dropped or why_left_out(rollout, flat=flat, algo=algo, prompt=group.prompt)
            status: Status = "dropped" if saved.dropped else "left out" if reason else "trained"
            logprobs = saved.policy_logprobs[number] if number < len(saved.policy_logprobs) else b""
            own = advantages[number]
            mean = float(own.mean()) if len(own) else 0.0
            yield self._rollout(group.prompt, number, rollout, logprobs, mean, (status, reason))

    def _rollout(
        self,
        prompt: PromptGroup,
        number: int,
        rollout: Rollout,
        policy_logprobs: bytes,
        advantage: float,
        fate: tuple[Status, str],
    ) -> KeptRollout:
        completion = rollout.completion
        tokens = bytes_to_tokens(completion.tokens)
        places = sampled_places(len(tokens), completion.given)
        versions, sampled = np.full(len(tokens), -1, dtype=np.int64), np.zeros(len(tokens), dtype=bool)
        versions[places] = np.repeat(
            [run.version for run in completion.versions], [run.count for run in completion.versions]
        )
        sampled[places] = True
        columns = {name: _aligned(data, len(tokens), places) for name, data in rollout.columns.items()}
        return KeptRollout(
            number=number,
            text=self._tokenizer.decode(tokens.tolist()),
            turns=tuple(self._turns(completion)),
            tokens=tokens,
            sampled=sampled,
            versions=versions,
            behavior_logprobs=_aligned(completion.behavior_logprobs, len(tokens), places),
            policy_logprobs=_aligned(policy_logprobs, len(tokens), places),
            columns=columns,
            truncated=completion.truncated,
            reward=rollout.reward,
            parts=rollout.parts,
            given=given_answer(
                judged_text(self._tokenizer, completion, self._config.conversation.judge),
                prompt.problem,
                self._config.reward,
            ),
            advantage=advantage,
            status=fate[0],
            reason=fate[1],
            sample=completion.sample,
            player=completion.player,
        )

    def _turns(self, completion: Completion) -> Iterator[AnswerTurn]:
        tokens, at = bytes_to_tokens(completion.tokens).tolist(), 0
        for reply in completion.given:
            yield AnswerTurn("model", self._tokenizer.decode(tokens[at : reply.start]))
            at = reply.start + reply.count
            yield AnswerTurn("tool", self._tokenizer.decode(tokens[reply.start : at]))
        if at < len(tokens) or not completion.given:
            yield AnswerTurn("model", self._tokenizer.decode(tokens[at:]))


def _advantages(group: RolloutGroup, config: Config) -> list[Floats]:
    """Advantages of each rollout's sampled tokens, as the trainer took them."""
    estimates = estimate_advantages(group, config.algo)
    return [
        bytes_to_floats(rollout.columns[TOKEN_ADVANTAGES])
        if TOKEN_ADVANTAGES in rollout.columns
        else np.full(max(1, rollout.completion.num_tokens), estimate, dtype=np.float32)
        for rollout, estimate in zip(group.rollouts, estimates, strict=True)
    ]


def _aligned(data: bytes, num_tokens: int, places: NDArray[np.int64]) -> Floats:
    """Values of the sampled tokens at their places among all tokens; NaN elsewhere, or everywhere if there are none."""
    values = np.full(num_tokens, np.nan, dtype=np.float32)
    if data:
        values[places] = bytes_to_floats(data)
    return values
