"""Which updates of a run are compared: those after the start and before the first evaluation in between."""

from __future__ import annotations

from arms import Record, Window

WARM_UP = 5  # updates: what is compiled, is compiled by then


def steady(record: Record, num_updates: int | None = None) -> Window:
    later = [version for version in record.accuracy if version > WARM_UP]
    end = min([*later, len(record.updates)]) - 1
    last = end if num_updates is None else min(end, WARM_UP + num_updates - 1)
    return record.window(WARM_UP, last)
