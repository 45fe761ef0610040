"""Which hosts take the ranks of an executor."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class HostRoom(Struct, frozen=True):
    """How much room a host has for one role."""

    host: int
    used: int  # number of ranks that live there
    free: int  # number of ranks that still fit


def place(rooms: Sequence[HostRoom], num_ranks: int, *, may_span: bool) -> list[tuple[int, int]]:
    """(host, number of ranks) of every host that takes part: the emptiest host with room for all, or else, if they may span
    hosts, as few as possible. Empty if there is no room."""
    whole = [room for room in rooms if room.free >= num_ranks]
    if whole:
        return [(min(whole, key=lambda room: (room.used, room.host)).host, num_ranks)]
    placed: list[tuple[int, int]] = []
    for room in sorted(rooms, key=lambda room: (-room.free, room.host)):
        taken = min(room.free, num_ranks)
        if taken:
            placed.append((room.host, taken))
            num_ranks -= taken
    return placed if may_span and not num_ranks else []
