"""Sequences on their way through a decoder: waiting, running, parked, and what the device has to compute for them. Uses no
tensor and no device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from llamarl.generate.kv_splits import parts_of_long
from llamarl.generate.stop_strings import StopStrings
from llamarl.types import Completion, Given, PromptGroup

NOBODY = -1  # version of tokens that no policy sampled
Key = tuple[int, int]  # identifies a sequence: ordinal of its group, index of its sample


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How one group differs from the others of its decoder."""

    draws: int | None = None  # what its random numbers follow from, besides the decoder's seed; None: its ordinal
    stop: StopStrings | None = None  # ends its completions in place of the decoder's own stop strings
    stream: bool = False  # whether its tokens are told while they are sampled

    @property
    def looked_at(self) -> bool:
        """Whether the host reads its tokens after every burst."""
        return self.stream or bool(self.stop)


AS_ALL_OTHERS = GroupOptions()


@dataclass
class GroupUnderway:
    """A group with completions still missing."""

    prompt: PromptGroup
    tokens: list[int]
    options: GroupOptions = AS_ALL_OTHERS
    prompt_pages: list[int] | None = None  # held until the last sample has started
    num_read: int = 0  # tokens of the prompt in these pages
    completions: dict[int, Completion] = field(default_factory=dict)  # by sample
    not_started: int = 0  # samples
    num_readings: int = 0  # how often its prompt was read from the first token on
    routes: bytes = b""  # experts of its prompt's tokens (`route_pages.py`)
    route_reading: int | None = None  # the reading that these are of


class Sampled(NamedTuple):
    """Tokens of a completion so far, with the log-prob and policy version of each."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]

    def part(self, start: int, end: int) -> Sampled:
        return Sampled(self.tokens[start:end], self.logprobs[start:end], self.versions[start:end])

    def extend(self, more: Sampled) -> None:
        self.tokens.extend(more.tokens)
        self.logprobs.extend(more.logprobs)
        self.versions.extend(more.versions)


@dataclass
class Sequence:
    """One sample of a group. `sampled` is its state when it was last paused, parked or read again; tool replies are in it
    with version `NOBODY`."""

    group: GroupUnderway
    sample: int
    sampled: Sampled = field(default_factory=lambda: Sampled([], [], []))
    given: list[Given] = field(default_factory=list)
    seen: Sampled = field(default_factory=lambda: Sampled([], [], []))  # what the host has read, if it looks
    num_streamed: int = 0  # tokens of `seen` that were told
    kept: list[int] = field(default_factory=list)  # pages that it holds without a slot
    num_kept: int = 0  # tokens in these pages
    reading: int = 0  # the reading of its prompt that it began with
    routes: bytearray = field(default_factory=bytearray)  # experts of the states that predicted its tokens
    prompt_routes: bytes = b""  # those of its prompt, where they are not the group's

    @property
    def key(self) -> Key:
        return self.group.prompt.ordinal, self.sample

    @property
    def num_given(self) -> int:
        return sum(reply.count for reply in self.given)

    @property
    def room(self) -> int:
        """Number of tokens that it may still get."""
        return self.group.prompt.sampling.max_new_tokens - len(self.sampled.tokens)

    @property
    def read(self) -> list[int]:
        """All tokens so far; the last one is read by the next decode step."""
        return self.group.tokens + self.sampled.tokens

    @property
    def num_tokens(self) -> int:
        """Number of all tokens so far."""
        return len(self.group.tokens) + len(self.sampled.tokens)

    @property
    def num_unread(self) -> int:
        """Tokens to read before it can start."""
        if self.sampled.tokens:
            return self.num_tokens - 1 - self.num_kept
        return len(self.group.tokens) - 1 - self.group.num_read

    @property
    def max_tokens(self) -> int:
        """Most tokens that can ever be in its pages; the last sampled one is never read."""
        return len(self.group.tokens) + self.group.prompt.sampling.max_new_tokens - 1


@dataclass
class Running:
    """A sequence in a slot. `max_count` is the most it can have sampled by now; the host learns the true count later."""

    sequence: Sequence
    slot: int
    pages: list[int]
    max_count: int
    since: int  # number of its first burst
    shared_pages: int = 0  # number of its first pages that others of its group may hold too

    def tokens_after(self, steps: int) -> int:
        """Most tokens that can be in its pages after `steps` more steps."""
        return min(len(self.sequence.group.tokens) + self.max_count + steps - 1, self.sequence.max_tokens)

    @property
    def may_run(self) -> bool:
        return self.max_count < self.sequence.group.prompt.sampling.max_new_tokens

    @property
    def count_if_running(self) -> int:
        return min(self.max_count, self.sequence.group.prompt.sampling.max_new_tokens)


@dataclass(frozen=True)
class Fill:
    """Keys and values of a whole sequence to compute, and the pages they go to."""

    tokens: list[int]
    pages: list[int]


@dataclass(frozen=True)
class Extension:
    """Keys and values to compute for tokens from position `start` on, behind those already in these pages."""

    tokens: list[int]
    start: int
    pages: list[int]


@dataclass
class Admission:
    """Work for the device before the next burst, in this order."""

    fills: list[Fill] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # page -> page
    started: list[Running] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to read."""
        return sum(len(fill.tokens) for fill in self.fills) + sum(len(one.tokens) for one in self.extensions)


@dataclass(frozen=True)
class DecodeBatch:
    """Slots in the order of their rows; those that share pages stand side by side. Reading i serves `counts[i]` rows from
    `firsts[i]` on, and row b gets its first `skips[b]` tokens from there. Long sequences come first; attention splits those
    that are far longer than most into `parts`."""

    slots: list[int]
    firsts: list[int]
    counts: list[int]
    skips: list[int]
    parts: int = 0

    @property
    def longest_shared(self) -> int:
        """Most tokens that a reading has."""
        return max(self.skips, default=0)

    @property
    def saved_tokens(self) -> int:
        """Cached tokens that need not be read because a reading is shared."""
        return sum((count - 1) * self.skips[first] for first, count in zip(self.firsts, self.counts, strict=True))


def make_batch(running: Collection[Running], members: int, page_tokens: int) -> DecodeBatch:
    """The batch of all running sequences, with at most `members` rows for one reading."""
    together: dict[int, list[Running]] = defaultdict(list)
    lengths = {one.slot: one.tokens_after(0) for one in running}
    for one in running:
        together[one.pages[0] if one.shared_pages else -1 - one.slot].append(one)
    batch = DecodeBatch([], [], [], [], parts=parts_of_long(lengths.values()))
    for alike in sorted(together.values(), key=lambda alike: max(lengths[one.slot] for one in alike), reverse=True):
        for start in range(0, len(alike), members):
            some = alike[start : start + members]
            skip = some[0].shared_pages * page_tokens if len(some) > 1 else 0
            if skip:
                batch.firsts.append(len(batch.slots))
                batch.counts.append(len(some))
            batch.skips.extend([skip] * len(some))
            batch.slots.extend(one.slot for one in some)
    return batch
