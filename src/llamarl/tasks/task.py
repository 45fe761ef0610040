"""A task: training problems in a seeded order with random access, and problems that are held out for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from llamarl.errors import InputError
from llamarl.types import Problem

Item = TypeVar("Item")


class Lazily(Sequence[Item]):
    """A sequence of make(source), computed on access: a task may hold a million problems and use a thousand."""

    def __init__(self, make: Callable[[Any], Item], sources: Any) -> None:
        self._make, self._sources = make, sources

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Lazily[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Lazily[Item]:
        found = self._sources[index]
        return Lazily(self._make, found) if isinstance(index, slice) else self._make(found)


class Prompter(Protocol):
    """What a job needs of a task. A problem depends on the seed and the ordinal alone, so the next ordinal is the only state
    that a snapshot must keep."""

    def problem(self, ordinal: int) -> Problem:
        """The training problem with this number; 0 is the first, and there is no last."""

    def evaluation(self, count: int, split: str = "held_out") -> Sequence[Problem]:
        """At most `count` problems to evaluate on, always the same; `split` is evaluate.split."""


class Task:
    """Problems by ordinal; each pass over them has a new order."""

    def __init__(
        self,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
        *,
        seed: int,
        test: Sequence[Problem] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        """`notes` are shown to the user when the job begins."""
        if not train and not test:
            raise InputError("task: no problems are left to train on; lower task.held_out")
        self.train, self.held_out, self.test, self.notes = train, held_out, test, notes
        self._seed = seed
        self._pass = -1
        self._order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def problem(self, ordinal: int) -> Problem:
        """The training problem with this number, in the order of its pass over the data."""
        if not self.train:
            raise InputError("task.path: holds only test problems, and nothing to train on")
        number, index = divmod(ordinal, len(self.train))
        if number != self._pass:
            self._order = np.random.default_rng([self._seed, number]).permutation(len(self.train))
            self._pass = number
        return self.train[int(self._order[index])]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of training problems, for a curriculum."""
        return (len(self.train),)

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares of the prompts, for a curriculum: this task is a single part."""
        return (1.0,)

    def numbered(self, part: int, number: int) -> Problem:
        """The training problem with this number in the data, whatever the order of a pass."""
        return self.train[number]

    def evaluation(self, count: int, split: str = "held_out") -> Sequence[Problem]:
        """Return the first `count` held-out or test problems, in an order that is the same in every job."""
        kept = self.test if split == "test" else self.held_out
        if count and not kept:
            raise InputError(
                "evaluate.split: the task has no test problems; name a file with task.test_path"
                if split == "test"
                else "task: no problems are held out to evaluate on; raise task.held_out or set evaluate.prompts=0"
            )
        order = np.random.default_rng(0).permutation(len(kept))
        return [kept[index] for index in order[:count]]


def is_held_out(text: str, share: float) -> bool:
    """Whether a problem is held out. It depends on the text alone, so a problem never changes sides."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
