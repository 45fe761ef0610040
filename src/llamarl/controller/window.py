"""Turns settled groups into batches of P, in the order of their ordinals, or nearly so."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Window:
    """Takes settled ordinals and closes batches of `size`. At most `width - 1` younger groups ever pass an older one: only
    ordinals in [oldest, oldest + width) may be taken, where `oldest` is the smallest ordinal that is not taken yet."""

    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self.oldest = 0
        self._settled: list[int] = []
        self._taken: set[int] = set()
        self._open: list[int] = []

    def settle(self, ordinal: int) -> list[tuple[int, ...]]:
        """Returns the batches that this group closes; usually none."""
        heapq.heappush(self._settled, ordinal)
        closed = []
        while self._settled and self._settled[0] < self.oldest + self.width:
            self._take(heapq.heappop(self._settled))
            if len(self._open) == self.size:
                closed.append(tuple(sorted(self._open)))
                self._open.clear()
        return closed

    def resume(self, oldest: int, taken: Iterable[int]) -> None:
        """Go on where another window ended: all ordinals below `oldest` are taken, and these above it."""
        self.oldest, self._taken = oldest, set(taken)

    def is_taken(self, ordinal: int) -> bool:
        return ordinal < self.oldest or ordinal in self._taken

    def _take(self, ordinal: int) -> None:
        self._open.append(ordinal)
        self._taken.add(ordinal)
        while self.oldest in self._taken:
            self._taken.remove(self.oldest)
            self.oldest += 1
