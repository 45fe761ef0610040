"""The rollouts of a run that stay readable: whole groups of every update, with what became of them.

There are two append-only logs below `rollouts/` in the run folder. `groups/` holds the groups, `index/` a row for each update
with the places of its groups. A row is written behind its groups, so a row that can be read has all of them. An update that
is made again has another row, which replaces the first; a rewind is a row that takes back all updates from some number on.

Rows and groups reach the operating system with every update, and the disk before a snapshot counts: whatever a crash takes
away behind a snapshot is trained and written again.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from llamarl.errors import InputError
from llamarl.failpoints import failpoint
from llamarl.io.record_log import RecordTail, SegmentWriter, read_record
from llamarl.types import CompletionGroup, Group, PromptGroup, RolloutGroup, completions_of

ROLLOUTS = "rollouts"
TOKENIZER = "tokenizer.json"  # in `rollouts/`: a copy of the policy's, so that the texts can be read for ever
ALL = -1  # value of observe.rollouts_mb
_MB = 1 << 20
_BYTES_PER_TOKEN = 12  # token, log-prob when it was sampled, log-prob when it was trained


class DamagedGroup(InputError):
    """A group of a run's rollouts cannot be read; others can."""


class SavedGroup(Struct, frozen=True, omit_defaults=True):
    """A group as it was trained by `update`, or as it was when it was dropped."""

    update: int
    group: PromptGroup | CompletionGroup | RolloutGroup
    policy_logprobs: tuple[bytes, ...] = ()  # of each rollout's trained tokens, fp32, under the policy being trained
    dropped: str = ""  # why it was dropped; empty: it was in the batch


class GroupPlace(Struct, frozen=True, array_like=True):
    """Where a group is stored, and what a list of groups shows of it."""

    ordinal: int
    segment: int
    offset: int
    rewards: tuple[float, ...]  # none if it was dropped
    dropped: str = ""


class SavedUpdate(Struct, frozen=True, tag="update"):
    """Row of the index: the kept groups of an update, by ordinal."""

    update: int
    num_groups: int  # groups in the batch, whether they were kept or not
    groups: tuple[GroupPlace, ...]


class SavedRewind(Struct, frozen=True, tag="rewind"):
    """Row of the index: updates from this one on do not count any more; they are made again."""

    to_update: int


_encode = msgspec.msgpack.Encoder().encode
_decode_group = msgspec.msgpack.Decoder(SavedGroup).decode
_decode_row = msgspec.msgpack.Decoder(SavedUpdate | SavedRewind).decode


class RolloutLog:
    """Writes the rollouts of a run. `limit_mb` is observe.rollouts_mb, which the `updates` of the job share evenly."""

    def __init__(self, folder: Path, limit_mb: int, updates: int, next_update: int = 0) -> None:
        self._limit_bytes = None if limit_mb == ALL else -(-limit_mb * _MB // max(1, updates))
        self._groups: SegmentWriter | None = None
        self._index: SegmentWriter | None = None
        existed = (folder / "index").is_dir()
        if limit_mb or existed:
            self._groups, self._index = SegmentWriter(folder / "groups"), SegmentWriter(folder / "index")
        if existed:
            self.rewind(next_update)  # the job goes on from a snapshot

    def choose(self, batch: Mapping[int, Group]) -> tuple[int, ...]:
        """Ordinals of the groups of a batch that are kept, ascending. The choice depends on ordinals and sizes alone."""
        if self._limit_bytes is None:
            return tuple(sorted(batch))
        kept: list[int] = []
        left_bytes = self._limit_bytes
        for ordinal in sorted(batch, key=_shuffled) if left_bytes else ():
            left_bytes -= _size(batch[ordinal])
            if kept and left_bytes < 0:
                break  # taking a shorter one instead would favor short answers
            kept.append(ordinal)
        return tuple(sorted(kept))

    def add(self, update: int, num_groups: int, groups: Sequence[SavedGroup]) -> None:
        """Write the kept groups of an update."""
        if self._groups is None or self._index is None or not self._keeps:
            return
        places = []
        for saved in groups:
            segment = self._groups.append(_encode(saved))
            scored = saved.group.rollouts if isinstance(saved.group, RolloutGroup) and not saved.dropped else ()
            rewards = tuple(rollout.reward for rollout in scored)
            places.append(GroupPlace(saved.group.ordinal, segment, self._groups.offset, rewards, saved.dropped))
        self._groups.flush()
        failpoint("rollouts.index")
        self._index.append(_encode(SavedUpdate(update, num_groups, tuple(places))))
        self._index.flush()

    def rewind(self, to_update: int) -> None:
        """Take back all updates from this one on."""
        if self._index is not None:
            self._index.append(_encode(SavedRewind(to_update)))
            self._index.flush()

    def sync(self) -> None:
        """Write everything to disk; groups before the rows that name them."""
        for log in (self._groups, self._index):
            if log is not None:
                log.sync()

    def close(self) -> None:
        for log in (self._groups, self._index):
            if log is not None:
                log.close()

    @property
    def _keeps(self) -> bool:
        return self._limit_bytes is None or self._limit_bytes > 0


def _shuffled(ordinal: int) -> tuple[int, int]:
    return zlib.crc32(ordinal.to_bytes(8, "little", signed=True)), ordinal


def _size(group: Group) -> int:
    """About the bytes that a group takes on disk."""
    prompt = group if isinstance(group, PromptGroup) else group.prompt
    tokens = sum(len(completion.tokens) for completion in completions_of(group)) // 4
    return len(prompt.prompt_tokens) + len(prompt.problem.prompt) + _BYTES_PER_TOKEN * tokens


class RolloutIndex:
    """Reads the rollouts of a run, also while it runs: `refresh` takes in what was written since. Holds the index only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = RecordTail(folder / "index")
        self._updates: dict[int, SavedUpdate] = {}
        self.refresh()

    def refresh(self) -> None:
        for record in self._tail.read():
            try:
                row = _decode_row(record)
            except msgspec.MsgspecError as error:
                raise InputError(f"{self._folder / 'index'}: not a row of rollouts: {error}") from None
            if isinstance(row, SavedUpdate):
                self._updates[row.update] = row
            else:
                self._updates = {update: kept for update, kept in self._updates.items() if update < row.to_update}

    @property
    def damage(self) -> list[str]:
        """One line for each place of the index that cannot be read; the updates there are missing."""
        return self._tail.damage

    @property
    def updates(self) -> list[int]:
        """Updates that have rollouts, ascending."""
        return sorted(self._updates)

    def get(self, update: int) -> SavedUpdate | None:
        return self._updates.get(update)

    def read(self, place: GroupPlace) -> SavedGroup:
        return read_group(self._folder, place.segment, place.offset)


def read_group(folder: Path, segment: int, offset: int) -> SavedGroup:
    """Read the group at a place of the rollouts in a folder. DamagedGroup if it cannot be read."""
    groups = folder / "groups"
    try:
        return _decode_group(read_record(groups, segment, offset))
    except InputError as error:
        raise DamagedGroup(str(error)) from None
    except msgspec.MsgspecError as error:
        raise DamagedGroup(f"{groups}: not a group: {error}") from None
