"""The arithmetic task: addition of two numbers, each pair of operands once, some pairs held out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamarl.config import DatasetConfig
from llamarl.tasks.examples import Example
from llamarl.tasks.task import Lazily, is_held_out

TEMPLATE = "{prompt}"
SCORER = "exact"


def addition(a: int, b: int) -> Example:
    return Example(f"{a}+{b}=", str(a + b), str(a + b))


def additions(settings: DatasetConfig) -> tuple[Lazily[Example], Lazily[Example]]:
    """Return (training, held out), each in the order 0+0, 0+1, ..."""
    count = settings.max_operand + 1
    held_out = _held_out_pairs(count, settings.held_out)

    def chosen(pairs: NDArray[np.bool_]) -> Lazily[Example]:
        return Lazily(lambda number: addition(*divmod(int(number), count)), np.flatnonzero(pairs))

    return chosen(~held_out), chosen(held_out)


def _held_out_pairs(count: int, share: float) -> NDArray[np.bool_]:
    """Return a table over both operands. a+b and b+a are on the same side, since one gives away the other."""
    table = np.zeros((count, count), dtype=np.bool_)
    table[np.triu_indices(count)] = [is_held_out(f"{a}+{b}", share) for a in range(count) for b in range(a, count)]
    return table | table.T
