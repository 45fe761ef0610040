"""A group as the controller sees it. The payload stays in the GroupStore."""

from __future__ import annotations

from msgspec import Struct

from llamarl.types import GroupKind


class GroupSpec(Struct, frozen=True):
    """What a group asks of an executor."""

    ordinal: int
    kind: GroupKind
    num_completions: int
    version: int | None = None  # the version that must sample it; None: the newest one

    @property
    def priority(self) -> int:
        """Groups are handed out by priority, lowest first, then by ordinal: older versions come first."""
        return self.version or 0
