"""A replica's decoding in virtual time, from the end of one answer to the end of the next.

Every answer under way grows by one token in each decode step, so its last step is known when it starts. An answer that waits
for a slot starts when another ends, so its start is known when it arrives. The time of a step depends on the number of
answers under way and on their lengths; between two ends it grows evenly.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from math import inf, sqrt
from typing import Protocol

_SOON = 1e-6  # steps


class Pace(Protocol):
    """The speed of a replica; `plan.generator.Replica` is one."""

    @property
    def prompt(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def late_steps(self) -> float: ...

    def step_s(self, active: float, cached_tokens: float) -> float: ...

    def growth_s(self, active: int, cached_tokens: float) -> float: ...

    def prefill_s(self, groups: int) -> float: ...


class Decoding:
    def __init__(self, replica: Pace) -> None:
        self.replica = replica
        self._late = replica.late_steps
        self.clear()

    def clear(self) -> None:
        self._step = 0.0  # number of steps made so far
        self._free: list[float] = []  # a heap: the step at which each slot that was ever used is free again
        self._starts: list[float] = []  # the steps at which waiting answers get a slot, in order
        self._ends: list[float] = []  # the steps at which answers end, under way or waiting, in order
        self._groups: list[tuple[float, int]] = []  # a heap: (step at which the last answer of a group ends, ordinal)
        self._mean_start = 0.0  # the mean step at which answers under way started

    def start(self, ordinal: int, lengths: list[int]) -> None:
        last = 0.0
        for length in lengths:
            if (self._free and self._free[0] <= self._step) or len(self._free) >= self.replica.slots:
                start = max(self._step, heapq.heappop(self._free))
            else:
                start = self._step
            end = start + length + self._late
            heapq.heappush(self._free, end)
            insort(self._ends, end)
            if start > self._step:
                insort(self._starts, start)
            else:
                self._mean_start += (start - self._mean_start) / self._active(0, 0)
            last = max(last, end)
        heapq.heappush(self._groups, (last, ordinal))

    def due_s(self) -> float:
        """Seconds until the next group is whole."""
        if not self._groups:
            return inf
        last, at, spent_s, started, mean = self._groups[0][0], self._step, 0.0, 0, self._mean_start
        for ended in range(bisect_right(self._ends, last)):
            end = self._ends[ended]
            first_s, slope_s = self._pace(ended, started, at, mean)
            spent_s += (end - at) * (first_s + slope_s * (end - at) / 2)
            at = end
            started, mean = self._started_by(end, ended + 1, started, mean)
        return spent_s

    def advance(self, worked_s: float) -> list[int]:
        """Returns the groups that are whole now."""
        ended = started = 0
        while ended < len(self._ends):
            end = self._ends[ended]
            first_s, slope_s = self._pace(ended, started, self._step, self._mean_start)
            needed_s = (end - self._step) * (first_s + slope_s * (end - self._step) / 2)
            if needed_s > worked_s * (1 + 1e-12) + 1e-12:
                self._step += _steps_in(worked_s, first_s, slope_s)
                break
            worked_s = max(0.0, worked_s - needed_s)
            self._step = end
            ended += 1
            started, self._mean_start = self._started_by(end, ended, started, self._mean_start)
        del self._ends[:ended], self._starts[:started]
        return self._whole()

    def _started_by(self, step: float, ended: int, started: int, mean: float) -> tuple[int, float]:
        """The number of waiting answers that have started by `step`, and the mean start of the answers then under way."""
        while started < len(self._starts) and self._starts[started] <= step:
            started += 1
            active = self._active(ended, started)
            mean += (self._starts[started - 1] - mean) / active
        return started, mean

    def _active(self, ended: int, started: int) -> int:
        """Number of answers under way when the first `ended` are over and `started` of those that waited have begun."""
        return len(self._ends) - ended - (len(self._starts) - started)

    def _pace(self, ended: int, started: int, step: float, mean_start: float) -> tuple[float, float]:
        """Seconds that a step takes then, and the growth from each step to the next."""
        active = self._active(ended, started)
        cached = active * max(0.0, self.replica.prompt + step - mean_start)
        return self.replica.step_s(active, cached), self.replica.growth_s(active, cached)

    def _whole(self) -> list[int]:
        found = []
        while self._groups and self._groups[0][0] <= self._step + _SOON:
            found.append(heapq.heappop(self._groups)[1])
        return found


def _steps_in(seconds: float, first_s: float, slope_s: float) -> float:
    """Number of steps that fit: seconds = steps * first_s + steps^2 * slope_s / 2."""
    if slope_s <= 0:
        return seconds / first_s
    return (sqrt(first_s * first_s + 2 * slope_s * seconds) - first_s) / slope_s
