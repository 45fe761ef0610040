"""Turns settled groups into batches of P, in the order of their ordinals, or nearly so."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable


class Window:
    """Takes settled ordinals and closes batches of `size`. At most `width - 1` younger groups ever pass an older one: only
    ordinals in [oldest, oldest + width) may be taken, where `oldest` is the smallest ordinal that is not taken yet. A taken
    ordinal enters the open batch, unless `leave_out(ordinal, update)` says that it is in none."""

    def __init__(
        self, size: int, width: int, leave_out: Callable[[int, int], bool] = lambda ordinal, update: False
    ) -> None:
        self.size, self.width, self._leave_out = size, width, leave_out
        self.oldest = 0
        self._update = 0  # of the open batch
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
                self._update += 1
        return closed

    def resume(self, oldest: int, taken: Iterable[int], update: int) -> None:
        """Go on where another window ended: all ordinals below `oldest` are taken, and these above it; the next batch is that
        of `update`."""
        self.oldest, self._taken, self._update = oldest, set(taken), update

    def is_taken(self, ordinal: int) -> bool:
        return ordinal < self.oldest or ordinal in self._taken

    def _take(self, ordinal: int) -> None:
        if not self._leave_out(ordinal, self._update):
            self._open.append(ordinal)
        self._taken.add(ordinal)
        while self.oldest in self._taken:
            self._taken.remove(self.oldest)
            self.oldest += 1
