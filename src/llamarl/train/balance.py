"""Deals items of all sizes into bins of a limited size, as evenly as possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], limit: int, multiple: int = 1) -> list[list[int]]:
    """Deals items into as few bins as possible of at most `limit` each (a longer item is alone), filled as evenly as
    possible. The number of bins is a multiple of `multiple`; some may be empty. Longest first, each to the emptiest bin."""
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    count = -(-max(1, -(-sum(lengths) // limit)) // multiple) * multiple
    while (bins := _deal(order, lengths, limit, count)) is None:
        count += multiple
    return bins


def _deal(order: Sequence[int], lengths: Sequence[int], limit: int, count: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    fill = [(0, number) for number in range(count)]
    for item in order:
        used, number = fill[0]
        if used and used + lengths[item] > limit:
            return None  # it does not even fit the emptiest bin
        bins[number].append(item)
        heapq.heapreplace(fill, (used + lengths[item], number))
    return [sorted(items) for items in bins]
