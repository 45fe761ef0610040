"""The GroupStore: payloads by ordinal, in memory and, once scored, in append-only segments on disk.

Groups pass through it on their way down the line; the controller sees only facts about them. A rollout stays until a snapshot
covers it, so that a trainer, or the whole job, can come back and train on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from llamarl.errors import InputError
from llamarl.failpoints import failpoint
from llamarl.io.record_log import SegmentWriter, read_records
from llamarl.types import CompletionGroup, Group, RolloutGroup, has_same_rewards

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RolloutGroup).decode


class GroupStore:
    """Groups by ordinal. `on_damage` is told of records that cannot be read: their groups are missing, and can be generated
    again. Without it, damage is an InputError."""

    def __init__(self, folder: Path, on_damage: Callable[[str], None] | None = None) -> None:
        self._groups: dict[int, Group] = {}
        self._segment_of: dict[int, int] = {}
        self._in_segment: dict[int, set[int]] = {}
        self._writer = SegmentWriter(folder)
        self._recover(folder, on_damage)

    def put(self, group: Group, *, passing: bool = False) -> None:
        """Store a group. `passing`: another role will add to it, so it does not go to disk yet."""
        failpoint("store.put")
        self._groups[group.ordinal] = group
        if isinstance(group, RolloutGroup) and group.kind == "train" and not passing:
            self._note(group.ordinal, self._writer.append(_encode(group)))

    def amend(self, groups: Iterable[RolloutGroup]) -> None:
        """Replace groups by ones with columns that a role added. These can be computed again, so they stay in memory."""
        for group in groups:
            if group.ordinal in self._groups:
                self._groups[group.ordinal] = group

    def get(self, ordinal: int) -> Group:
        return self._groups[ordinal]

    def rollouts(self, ordinals: Iterable[int]) -> tuple[RolloutGroup, ...]:
        """The scored ones of these groups; a dropped group has nothing to train on."""
        found = (self._groups.get(ordinal) for ordinal in ordinals)
        return tuple(group for group in found if isinstance(group, RolloutGroup))

    def completion(self, ordinal: int) -> CompletionGroup | None:
        group = self._groups.get(ordinal)
        return group if isinstance(group, CompletionGroup) else None

    def drop(self, ordinal: int) -> None:
        failpoint("store.drop")
        self._groups.pop(ordinal, None)
        self._leave_segment(ordinal)

    def keep_only(self, ordinals: Iterable[int]) -> None:
        """Drop all other groups: after a resume, those that the snapshot covers are not needed."""
        for ordinal in self._groups.keys() - set(ordinals):
            self.drop(ordinal)

    @property
    def scored(self) -> set[int]:
        return {ordinal for ordinal, group in self._groups.items() if isinstance(group, RolloutGroup)}

    def without_variance(self, cut_off_penalty: float) -> set[int]:
        """Scored groups from which there is nothing to learn."""
        found = ((o, group) for o, group in self._groups.items() if isinstance(group, RolloutGroup))
        return {ordinal for ordinal, group in found if has_same_rewards(group, cut_off_penalty)}

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def _recover(self, folder: Path, on_damage: Callable[[str], None] | None) -> None:
        for segment, record in read_records(folder, on_damage):
            try:
                group = _decode(record)
            except msgspec.MsgspecError as error:
                raise InputError(f"{folder}: not a group: {error}") from None
            self._groups[group.ordinal] = group
            self._note(group.ordinal, segment)

    def _note(self, ordinal: int, segment: int) -> None:
        self._leave_segment(ordinal)
        self._segment_of[ordinal] = segment
        self._in_segment.setdefault(segment, set()).add(ordinal)

    def _leave_segment(self, ordinal: int) -> None:
        """Remove a segment from disk once none of its groups is needed."""
        segment = self._segment_of.pop(ordinal, None)
        if segment is None:
            return
        self._in_segment[segment].discard(ordinal)
        if not self._in_segment[segment] and segment != self._writer.number:
            del self._in_segment[segment]
            self._writer.remove(segment)
