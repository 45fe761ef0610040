"""The GroupStore: payloads by ordinal. Groups pass through it on their way; the controller sees only facts."""

from __future__ import annotations

from collections.abc import Iterable

from llamarl.types import Group, RolloutGroup


class GroupStore:
    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        self._groups[group.ordinal] = group

    def get(self, ordinal: int) -> Group:
        return self._groups[ordinal]

    def rollouts(self, ordinals: Iterable[int]) -> tuple[RolloutGroup, ...]:
        """Those of the groups that were scored; a dropped one has nothing to train on."""
        found = (self._groups.get(ordinal) for ordinal in ordinals)
        return tuple(group for group in found if isinstance(group, RolloutGroup))

    def drop(self, ordinal: int) -> None:
        self._groups.pop(ordinal, None)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._groups

    def __len__(self) -> int:
        return len(self._groups)
