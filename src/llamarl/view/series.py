"""Metrics by update: columns of numbers, and their means over bins, so that a page gets as many points as it can draw."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_FIRST_ROOM = 1024


class Columns:
    """Numbers by update and name; NaN where an update has none. A row that comes again replaces the earlier one."""

    def __init__(self) -> None:
        self._columns: dict[str, Floats] = {}
        self.num_updates = 0

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def clear(self) -> None:
        self._columns, self.num_updates = {}, 0

    def add(self, update: int, row: Mapping[str, Any], prefix: str = "") -> None:
        self.num_updates = max(self.num_updates, update + 1)
        for name, value in row.items():
            if isinstance(value, int | float):
                column = self._columns.get(prefix + name)
                if column is None or update >= len(column):
                    column = self._grown(prefix + name, column, update)
                column[update] = value

    def _grown(self, name: str, column: Floats | None, update: int) -> Floats:
        grown = np.full(max(_FIRST_ROOM, 2 * (update + 1)), np.nan)
        if column is not None:
            grown[: len(column)] = column
        self._columns[name] = grown
        return grown

    def get(self, name: str) -> Floats:
        """The column, one number per update so far; NaN if there is no such metric."""
        column = self._columns.get(name)
        if column is None:
            return np.full(self.num_updates, np.nan)
        if len(column) < self.num_updates:
            column = self._grown(name, column, self.num_updates)
        return column[: self.num_updates]


def binned(values: Floats, first: int, last: int, points: int) -> dict[str, list[float | None]]:
    """Mean, lowest and highest value of each of at most `points` bins of the updates [first, last)."""
    part = values[first:last]
    if len(part) <= points:
        mean = _listed(part)
        return {"mean": mean, "low": mean, "high": mean}
    starts = np.linspace(0, len(part), points + 1).astype(int)[:-1]
    known = ~np.isnan(part)
    counts = np.add.reduceat(known, starts)
    sums = np.add.reduceat(np.where(known, part, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, part, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, part, -np.inf), starts)
    empty = counts == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_of = np.where(empty, np.nan, sums / counts)
    return {
        "mean": _listed(mean_of),
        "low": _listed(np.where(empty, np.nan, low)),
        "high": _listed(np.where(empty, np.nan, high)),
    }


def bin_updates(first: int, last: int, points: int) -> list[int]:
    """The update that stands for each bin: the middle one."""
    count = last - first
    if count <= points:
        return list(range(first, last))
    edges = np.linspace(0, count, points + 1).astype(int)
    return [int(first + (a + b - 1) // 2) for a, b in pairwise(edges)]


def smoothed(values: Floats, width: int) -> Floats:
    """Mean over the last `width` known values, at each update."""
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values)) + 1
    before = np.maximum(0, at - width)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[at] - sums[before]) / (counts[at] - counts[before]))


def _listed(values: Floats) -> list[float | None]:
    finite = np.isfinite(values)
    return [float(f"{value:.6g}") if ok else None for value, ok in zip(values.tolist(), finite.tolist(), strict=True)]
