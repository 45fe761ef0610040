"""The types that flow down the line: Problem -> PromptGroup -> CompletionGroup -> RolloutGroup.

Each stage returns the next frozen type; nothing is half-filled. Tokens and log-probs are raw bytes (int32, fp32), so the
same objects travel between threads, processes and hosts without a copy into Python lists. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace
from numpy.typing import NDArray


class Turn(Struct, frozen=True):
    """One message of a chat."""

    role: str
    content: str


class Problem(Struct, frozen=True, omit_defaults=True):
    """One question of a task, and the answer that completions are scored against."""

    prompt: str
    answer: str
    turns: tuple[Turn, ...] = ()  # the prompt as a chat, for models with a chat template; empty: it is plain text
    scorer: str = ""  # the scorer to use when reward.scorer=auto
    columns: dict[str, Any] = {}  # columns of its data row that a user's scorer asks for
    teacher: str = ""  # name of its teacher, where the task names one


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


GroupKind = Literal["train", "evaluation", "probe", "call"]
"""Where a group goes: into a batch, into an evaluation, to be measured, or back to the agent that asked."""


class PromptGroup(Struct, frozen=True, tag="prompt", omit_defaults=True):
    """One prompt, to be answered `sampling.samples` times. The ordinal identifies the group from start to end."""

    ordinal: int
    problem: Problem
    prompt_tokens: bytes
    sampling: Sampling
    kind: GroupKind = "train"
    stop: tuple[str, ...] = ()  # texts that end an answer, besides the job's own
    stop_token_ids: tuple[int, ...] = ()  # tokens that end an answer, besides the model's own
    written: WrittenAnswer | None = None  # the answer that data gives, to be imitated; None: answers are sampled
    teacher: str = ""  # name of the teacher that answers are compared with; empty: none
    routes: bytes = b""  # experts that read all its tokens but the last, once it was answered (`routes.py`)


class VersionRun(Struct, frozen=True, array_like=True):
    """A run of `count` consecutive tokens sampled by `version` of the policy."""

    version: int
    count: int


class Given(Struct, frozen=True, array_like=True):
    """A part of a completion that is not trained: `count` tokens from `start` on. A tool's reply or, with agents, anything
    that was not sampled here, or is trained in another branch."""

    start: int
    count: int


class WrittenAnswer(Struct, frozen=True, array_like=True):
    """An answer from data. Parts of it that are not to be learned, such as a user's later turns, are `given`."""

    tokens: bytes
    given: tuple[Given, ...] = ()


class Completion(Struct, frozen=True, omit_defaults=True):
    """One answer. Only its sampled tokens are trained; log-probs and versions exist for these alone."""

    tokens: bytes  # all tokens, tool replies included
    behavior_logprobs: bytes  # of the sampled tokens, under the distribution they were drawn from
    versions: tuple[VersionRun, ...]  # the policy versions that sampled them, in order
    truncated: bool  # ended by the token limit, not by a stop token
    given: tuple[Given, ...] = ()  # tool replies between the model's turns
    base_logprobs: bytes = b""  # of the sampled tokens under the base without its adapters; only where it was measured
    adapter_effect: bytes = b""  # log-probs with minus without adapters, of the same tokens
    sample: int | None = None  # the agent's sample that it is a branch of; None: it is a sample of its own
    player: int = 0  # which player of its sample wrote it, where an agent plays several sides
    routes: bytes = b""  # experts of the states that predicted its tokens, tool replies included (`routes.py`)
    prompt_routes: bytes = b""  # those of the tokens before, where they are not its group's

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens; tool replies excluded."""
        return len(self.behavior_logprobs) // 4

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """Tokens after the last tool reply; all tokens if there was none."""
        start = self.given[-1].start + self.given[-1].count if self.given else 0
        return bytes_to_tokens(self.tokens)[start:]


def sampled_places(num_tokens: int, given: Sequence[Given]) -> NDArray[np.int64]:
    """Indices of the sampled tokens in a completion of `num_tokens` tokens."""
    sampled = np.ones(num_tokens, dtype=bool)
    for reply in given:
        sampled[reply.start : reply.start + reply.count] = False
    return np.flatnonzero(sampled)


class ClaimedAnswer(Struct, frozen=True, array_like=True):
    """One answer of the policy as somebody else tells it: the ids of its prompt, its own ids, and their log-probs."""

    prompt: bytes
    tokens: bytes
    logprobs: bytes


class CompletionGroup(Struct, frozen=True, tag="completion"):
    prompt: PromptGroup
    completions: tuple[Completion, ...]

    @property
    def ordinal(self) -> int:
        return self.prompt.ordinal

    @property
    def kind(self) -> GroupKind:
        return self.prompt.kind


class Rollout(Struct, frozen=True, omit_defaults=True):
    """A completion with its reward. `columns` holds fp32 values per token, added by further roles under a name."""

    completion: Completion
    reward: float
    columns: dict[str, bytes] = {}
    parts: dict[str, float] = {}  # what each scorer gave, before its weight, where several make up the reward


class RolloutGroup(Struct, frozen=True, tag="rollout"):
    prompt: PromptGroup
    rollouts: tuple[Rollout, ...]

    @property
    def ordinal(self) -> int:
        return self.prompt.ordinal

    @property
    def kind(self) -> GroupKind:
        return self.prompt.kind

    @property
    def rewards(self) -> tuple[float, ...]:
        """One reward for each sample; the branches of an agent's sample share theirs. Of several players, the first one's."""
        return tuple(self.rollouts[first].reward for first in first_of_samples(completions_of(self)))


Group = PromptGroup | CompletionGroup | RolloutGroup


def completions_of(group: Group) -> tuple[Completion, ...]:
    """Completions of a group; none while it is only a prompt."""
    if isinstance(group, RolloutGroup):
        return tuple(rollout.completion for rollout in group.rollouts)
    return group.completions if isinstance(group, CompletionGroup) else ()


def first_of_samples(completions: Sequence[Completion]) -> list[int]:
    """Index of the first completion of each sample: of all, unless they are branches."""
    seen: set[int] = set()
    first: list[int] = []
    for number, completion in enumerate(completions):
        if completion.sample is None or completion.sample not in seen:
            first.append(number)
        if completion.sample is not None:
            seen.add(completion.sample)
    return first


def last_of_samples(completions: Sequence[Completion]) -> list[Completion]:
    """The last completion of each sample, which is judged: all of them, unless they are branches."""
    last = {number if one.sample is None else one.sample: one for number, one in enumerate(completions)}
    return list(last.values())


def written_group(prompt: PromptGroup, version: int) -> CompletionGroup:
    """A group whose answer is the one that its prompt came with, as if `version` had sampled it with certainty."""
    assert prompt.written is not None
    written = prompt.written
    count = len(sampled_places(len(written.tokens) // 4, written.given))
    runs = (VersionRun(version, count),)
    return CompletionGroup(prompt, (Completion(written.tokens, bytes(4 * count), runs, False, written.given),))


def without_routes(group: Group) -> Group:
    """The group without recorded experts, which only a trainer needs."""
    if not any(one.routes for one in completions_of(group)):
        return group
    if isinstance(group, RolloutGroup):
        rollouts = tuple(replace(one, completion=_unrouted(one.completion)) for one in group.rollouts)
        return replace(group, prompt=replace(group.prompt, routes=b""), rollouts=rollouts)
    if isinstance(group, CompletionGroup):
        completions = tuple(map(_unrouted, group.completions))
        return replace(group, prompt=replace(group.prompt, routes=b""), completions=completions)
    return group


def _unrouted(completion: Completion) -> Completion:
    return replace(completion, routes=b"", prompt_routes=b"")


def unjudged(group: CompletionGroup) -> RolloutGroup:
    """The same group with rewards of zero, which nothing is learned from."""
    return RolloutGroup(group.prompt, tuple(Rollout(completion, 0.0) for completion in group.completions))


class GroupFacts(Struct, frozen=True):
    """Everything the controller ever sees of a group's payload."""

    num_tokens: int = 0  # sampled tokens of all its completions
    first_version: int = 0  # oldest version that sampled any of them
    last_version: int = 0  # newest such version
    reward: float = 0.0  # mean over the group
    same_rewards: bool = False  # all answers are scored, and equally: there is nothing to learn from them


def facts_of(group: Group, cut_off_penalty: float = 0.0) -> GroupFacts:
    """Facts of a group. `cut_off_penalty` is what the update will take off the reward of answers that were cut off."""
    completions = completions_of(group)
    versions = [run.version for completion in completions for run in completion.versions]
    rewards = group.rewards if isinstance(group, RolloutGroup) else ()
    return GroupFacts(
        num_tokens=sum(completion.num_tokens for completion in completions),
        first_version=min(versions, default=0),
        last_version=max(versions, default=0),
        reward=sum(rewards) / len(rewards) if rewards else 0.0,
        same_rewards=isinstance(group, RolloutGroup) and has_same_rewards(group, cut_off_penalty),
    )


def has_same_rewards(group: RolloutGroup, cut_off_penalty: float = 0.0) -> bool:
    """Whether all advantages of the group would be zero. What is imitated has no advantages."""
    if group.prompt.written is not None:
        return False
    rewards = {
        (one.completion.player, one.reward - cut_off_penalty * one.completion.truncated) for one in group.rollouts
    }
    return len(rewards) <= len({player for player, _ in rewards})


def tokens_to_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def bytes_to_tokens(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype="<i4")


def floats_to_bytes(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def bytes_to_floats(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, dtype="<f4")
