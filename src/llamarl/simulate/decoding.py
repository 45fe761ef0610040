"""A replica's decoding in virtual time, from the end of one answer to the end of the next.

Every answer under way grows by one token in each decode step, so the step at which it ends is known when it starts. How long
a step takes depends on how many answers are under way and on how long they are; between two ends it grows evenly.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from math import inf, sqrt
from typing import Protocol

_SOON = 1e-6  # steps


class Pace(Protocol):
    """How long a replica takes; `plan.generator.Replica` is one."""

    @property
    def prompt(self) -> int: ...

    @property
    def late_steps(self) -> float: ...

    @property
    def cached_token_s(self) -> float: ...

    def step_s(self, active: float, cached_tokens: float) -> float: ...

    def prefill_s(self, groups: int) -> float: ...


class Decoding:
    def __init__(self, replica: Pace) -> None:
        self.replica = replica
        self._late, self._per_token_s = replica.late_steps, replica.cached_token_s
        self.clear()

    def clear(self) -> None:
        self._step = 0.0  # steps made so far
        self._ends: list[float] = []  # the step at which each answer under way ends, in order
        self._groups: list[tuple[float, int]] = []  # a heap: the step at which a group's last answer ends, ordinal
        self._mean_start = 0.0  # the step at which answers under way have started, on average

    def start(self, ordinal: int, lengths: list[int]) -> None:
        for length in lengths:
            insort(self._ends, self._step + length + self._late)
        heapq.heappush(self._groups, (self._step + max(lengths) + self._late, ordinal))
        self._mean_start += (self._step - self._mean_start) * len(lengths) / len(self._ends)

    def due_s(self) -> float:
        """Until the next group is whole."""
        if not self._groups:
            return inf
        last, at, spent_s = self._groups[0][0], self._step, 0.0
        for ended in range(bisect_right(self._ends, last)):
            end = self._ends[ended]
            first_s, slope_s = self._pace(ended, at)
            spent_s += (end - at) * (first_s + slope_s * (end - at) / 2)
            at = end
        return spent_s

    def advance(self, worked_s: float) -> list[int]:
        """Returns the groups that are whole now."""
        ended = 0
        while ended < len(self._ends):
            end = self._ends[ended]
            first_s, slope_s = self._pace(ended, self._step)
            needed_s = (end - self._step) * (first_s + slope_s * (end - self._step) / 2)
            if needed_s > worked_s * (1 + 1e-12) + 1e-12:
                self._step += _steps_in(worked_s, first_s, slope_s)
                break
            worked_s = max(0.0, worked_s - needed_s)
            self._step = end
            ended += 1
        del self._ends[:ended]
        return self._whole()

    def _pace(self, ended: int, step: float) -> tuple[float, float]:
        """Seconds of a step when the first `ended` answers are over, and by how much each step takes longer."""
        active = len(self._ends) - ended
        cached = active * max(0.0, self.replica.prompt + step - self._mean_start)
        return self.replica.step_s(active, cached), active * self._per_token_s

    def _whole(self) -> list[int]:
        found = []
        while self._groups and self._groups[0][0] <= self._step + _SOON:
            found.append(heapq.heappop(self._groups)[1])
        return found


def _steps_in(seconds: float, first_s: float, slope_s: float) -> float:
    """How many steps fit: seconds = steps * first_s + steps^2 * slope_s / 2."""
    if slope_s <= 0:
        return seconds / first_s
    return (sqrt(first_s * first_s + 2 * slope_s * seconds) - first_s) / slope_s
