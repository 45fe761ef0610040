"""What flows down the line: Problem -> PromptGroup -> CompletionGroup -> RolloutGroup.

Each stage returns the next frozen type; nothing is half-filled. Tokens and log-probs are raw bytes (int32, fp32), so the
same objects travel between threads, processes and hosts without a copy into Python lists. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray


class Turn(Struct, frozen=True):
    """One message of a chat."""

    role: str
    content: str


class Problem(Struct, frozen=True, omit_defaults=True):
    """One question of a task and the answer that its scorer holds completions against."""

    prompt: str
    answer: str
    turns: tuple[Turn, ...] = ()  # the same as a chat, for models that were taught one; else the prompt is plain text
    scorer: str = ""  # the one that suits it, for reward.scorer=auto
    columns: dict[str, Any] = {}  # of its row, those that a scorer of the user's asks for


class Sampling(Struct, frozen=True, kw_only=True):
    """How the completions of one prompt are drawn; the same struct from the config down to the decoder's slots.

    Every field is a number. A new filter is a field here, a setting of the same name in `config/generator.py`, and a few
    lines in `generate/sampling.py` and its twin `sampling_kernels.py`; everything between takes the fields as they come.
    """

    samples: Annotated[int, Meta(ge=1)] = 1
    max_new_tokens: Annotated[int, Meta(ge=1)] = 128
    temperature: Annotated[float, Meta(ge=0)] = 1.0  # 0 takes the likeliest token
    # Filters. Each default leaves every token possible.
    top_k: Annotated[int, Meta(ge=0)] = 0  # keep the k likeliest tokens
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0  # keep the fewest likeliest tokens that make up this probability
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0  # keep tokens at least this share as likely as the likeliest

    @property
    def filtered(self) -> bool:
        """Whether a filter may rule tokens out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class PromptGroup(Struct, frozen=True, tag="prompt"):
    """One prompt, to be answered `sampling.samples` times. The ordinal names the group for its whole life."""

    ordinal: int
    problem: Problem
    prompt_tokens: bytes
    sampling: Sampling


class VersionRun(Struct, frozen=True, array_like=True):
    """`count` consecutive tokens that were sampled by `version` of the policy."""

    version: int
    count: int


class Given(Struct, frozen=True, array_like=True):
    """`count` consecutive tokens of a completion, from `start` on, that were not sampled: a tool's reply."""

    start: int
    count: int


class Completion(Struct, frozen=True, omit_defaults=True):
    """One answer: its tokens; and of those that were sampled, which alone are trained, the log-probs under the distribution
    really sampled from and who sampled them."""

    tokens: bytes
    behavior_logprobs: bytes
    versions: tuple[VersionRun, ...]
    truncated: bool  # the token limit ended it, not a stop token
    given: tuple[Given, ...] = ()  # in a conversation, the replies between the model's turns

    @property
    def num_tokens(self) -> int:
        """That were sampled."""
        return len(self.behavior_logprobs) // 4

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """Its tokens after the last reply; all of them where there was none."""
        start = self.given[-1].start + self.given[-1].count if self.given else 0
        return bytes_to_tokens(self.tokens)[start:]


def sampled_places(num_tokens: int, given: Sequence[Given]) -> NDArray[np.int64]:
    """Which of so many tokens of a completion were sampled."""
    sampled = np.ones(num_tokens, dtype=bool)
    for reply in given:
        sampled[reply.start : reply.start + reply.count] = False
    return np.flatnonzero(sampled)


class CompletionGroup(Struct, frozen=True, tag="completion"):
    prompt: PromptGroup
    completions: tuple[Completion, ...]

    @property
    def ordinal(self) -> int:
        return self.prompt.ordinal


class Rollout(Struct, frozen=True):
    """A completion with its reward. `columns` holds fp32 values per token that further roles add by name."""

    completion: Completion
    reward: float
    columns: dict[str, bytes] = {}


class RolloutGroup(Struct, frozen=True, tag="rollout"):
    prompt: PromptGroup
    rollouts: tuple[Rollout, ...]

    @property
    def ordinal(self) -> int:
        return self.prompt.ordinal

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(rollout.reward for rollout in self.rollouts)


Group = PromptGroup | CompletionGroup | RolloutGroup


def completions_of(group: Group) -> tuple[Completion, ...]:
    """The answers a group has so far; none while it is only a prompt."""
    if isinstance(group, RolloutGroup):
        return tuple(rollout.completion for rollout in group.rollouts)
    return group.completions if isinstance(group, CompletionGroup) else ()


class GroupFacts(Struct, frozen=True):
    """All that the controller ever sees of a group's payload."""

    num_tokens: int = 0
    first_version: int = 0  # the oldest version that sampled any of its tokens
    last_version: int = 0
    reward: float = 0.0  # mean over the group


def facts_of(group: Group) -> GroupFacts:
    completions = completions_of(group)
    versions = [run.version for completion in completions for run in completion.versions]
    rewards = group.rewards if isinstance(group, RolloutGroup) else ()
    return GroupFacts(
        num_tokens=sum(completion.num_tokens for completion in completions),
        first_version=min(versions, default=0),
        last_version=max(versions, default=0),
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
    )


def tokens_to_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def bytes_to_tokens(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype="<i4")


def floats_to_bytes(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def bytes_to_floats(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, dtype="<f4")
