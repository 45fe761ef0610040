"""Addition of two numbers: every pair of operands once, some of them held out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamarl.config import DatasetConfig
from llamarl.tasks.datasets import Example
from llamarl.tasks.task import Lazily, is_held_out

TEMPLATE = "{prompt}"
SCORER = "exact"


def addition(a: int, b: int) -> Example:
    return Example(f"{a}+{b}=", str(a + b), str(a + b))


def additions(settings: DatasetConfig) -> tuple[Lazily[Example], Lazily[Example]]:
    """(training, held out), in the order 0+0, 0+1, ..."""
    count = settings.max_operand + 1
    held_out = _held_out_pairs(count, settings.held_out)

    def chosen(pairs: NDArray[np.bool_]) -> Lazily[Example]:
        return Lazily(lambda number: addition(*divmod(int(number), count)), np.flatnonzero(pairs))

    return chosen(~held_out), chosen(held_out)


def _held_out_pairs(count: int, share: float) -> NDArray[np.bool_]:
    """A table over both operands. a+b and b+a go together, so that neither gives the other away."""
    table = np.zeros((count, count), dtype=np.bool_)
    table[np.triu_indices(count)] = [is_held_out(f"{a}+{b}", share) for a in range(count) for b in range(a, count)]
    return table | table.T
