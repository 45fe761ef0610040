"""Fits the factors of a GPU's description to measured times: least squares on relative errors, with a prior.

Each measurement is a time and its terms; the factors multiply the terms. There are about as many measurements as factors, so
each factor is also pulled weakly towards a known value. No factor becomes negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct, to_builtins
from numpy.typing import NDArray

from llamarl.plan.gpus import Factors

PULL = 0.05  # weight of a relative deviation from the stated value, against one from a measurement

AnyFactors = TypeVar("AnyFactors", bound=Factors)


class Measured(Struct, frozen=True):
    """One measured time, and the terms that should explain it."""

    what: str
    seconds: float
    terms: Mapping[str, float]


def fit_factors(stated: AnyFactors, measured: Sequence[Measured]) -> AnyFactors:
    """The factors that explain the measurements best; those that no measurement has a term for stay as stated."""
    prior: dict[str, float] = to_builtins(stated)
    names = [name for name in prior if prior[name] and any(name in one.terms for one in measured)]
    # The unknowns are factors relative to the stated ones; each row is divided by its measured time.
    rows = [[one.terms.get(name, 0.0) * prior[name] / one.seconds for name in names] for one in measured]
    pulls = PULL * np.eye(len(names))
    found = _nonnegative(np.array([*rows, *pulls]), np.array([1.0] * len(rows) + [PULL] * len(names)))
    return type(stated)(
        **(prior | {name: float(value) * prior[name] for name, value in zip(names, found, strict=True)})
    )


def _nonnegative(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with a nonnegative solution: negative unknowns are set to 0 and the rest is solved again."""
    kept = list(range(matrix.shape[1]))
    while True:
        solved = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
        if (solved >= 0).all():
            found = np.zeros(matrix.shape[1])
            found[kept] = solved
            return found
        kept = [name for name, value in zip(kept, solved, strict=True) if value > 0]
