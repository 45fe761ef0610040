"""Which updates of a run are compared: those after the start, before the first evaluation in between, and before the end."""

from __future__ import annotations

from arms import Record, Window

WARM_UP = 5  # updates: what is compiled, is compiled by then


def steady(record: Record, num_updates: int | None = None, max_staleness: int = 0) -> Window:
    """Where many groups may be under way, the line has to fill first, and drains at the end: then no new ones come."""
    first = WARM_UP + max_staleness
    later = [version for version in record.accuracy if version > first]
    end = min([*later, len(record.updates) - max_staleness]) - 1
    last = end if num_updates is None else min(end, first + num_updates - 1)
    return record.window(first, last)
