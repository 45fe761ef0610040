"""A mixture of tasks, each with its share of the prompts.

Seed and ordinal alone determine the part and its problem. Ordinals form blocks; each block holds every part exactly in
proportion to its weight, in an order shuffled by the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from llamarl.errors import ConfigError
from llamarl.tasks.task import Task
from llamarl.types import Problem

_BLOCK = 1000


class PartOrder:
    """The order of a mixture's parts."""

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self._counts = shares(weights)
        self._seed = seed
        self._number = -1
        self._block: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def locate(self, ordinal: int) -> tuple[int, int]:
        """The part that the ordinal belongs to, and its number among the problems of that part."""
        number, index = divmod(ordinal, _BLOCK)
        if number != self._number:
            dealt = np.repeat(np.arange(len(self._counts)), self._counts)
            self._block = np.random.default_rng([self._seed, number, 1]).permutation(dealt)
            self._number = number
        part = int(self._block[index])
        earlier = int(np.count_nonzero(self._block[:index] == part))
        return part, number * self._counts[part] + earlier


class Mixture:
    """A task that is made of weighted parts."""

    def __init__(self, parts: Sequence[tuple[Task, float]], *, seed: int) -> None:
        self._tasks = [task for task, _ in parts]
        self.notes = tuple(note for task in self._tasks for note in task.notes)
        self.sizes = tuple(len(task.train) for task in self._tasks)
        self.weights = tuple(weight for _, weight in parts)
        self._order = PartOrder(self.weights, seed=seed)

    def problem(self, ordinal: int) -> Problem:
        part, number = self._order.locate(ordinal)
        return self._tasks[part].problem(number)

    def numbered(self, part: int, number: int) -> Problem:
        """The training problem with this number in the data of a part."""
        return self._tasks[part].train[number]

    def evaluation(self, count: int, split: str = "held_out") -> Sequence[Problem]:
        """Return problems from the parts in turn."""
        each = [task.evaluation(count, split) for task in self._tasks]
        dealt = [problem for row in zip_longest(*each) for problem in row if problem is not None]
        return dealt[:count]


def shares(weights: Sequence[float]) -> list[int]:
    """Return the number of prompts of each part in a block: integers that sum to the block size, nearest to the weights."""
    ideal = np.asarray(weights) / sum(weights) * _BLOCK
    counts = np.floor(ideal).astype(int)
    for index in np.argsort(counts - ideal, kind="stable")[: _BLOCK - int(counts.sum())]:
        counts[index] += 1
    if not counts.all():
        raise ConfigError(
            f"task.parts: a weight below 1/{_BLOCK} of all would never be asked; raise it or leave it out"
        )
    return [int(count) for count in counts]
