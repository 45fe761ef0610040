"""Distributions of answer lengths, written like `lognormal:median=800,sigma=1,max=8192`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamarl.errors import InputError

_STEPS = 200  # number of quantiles in the grid
FORMS = "fixed:N, uniform:min=A,max=B, lognormal:median=M,sigma=S,max=N, or file:PATH with one length on each line"


class Lengths:
    """A distribution of answer lengths. All figures come from a grid of quantiles, which is finer for long answers."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._longest: dict[float, float] = {}
        kind, _, text = spec.partition(":")
        self._form: _Form = _FORMS.get(kind, _refuse)(spec, text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and other.spec == self.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw `count` lengths of at least one token each."""
        return np.maximum(1, np.rint(self._form.draw(random, count))).astype(np.int64)

    def quantile(self, share: float) -> float:
        """Length that this share of the answers does not exceed."""
        return self._form.at(share)

    @cached_property
    def edges(self) -> NDArray[np.float64]:
        """Shares at the boundaries of the grid's cells."""
        return 1 - (1 - np.linspace(0, 1, _STEPS + 1)) ** 3

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Length at the middle of each grid cell."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        return np.array([max(1.0, self.quantile(float(share))) for share in middles])

    @cached_property
    def mean(self) -> float:
        return float(self.values @ np.diff(self.edges))

    @cached_property
    def mean_square(self) -> float:
        return float(self.values**2 @ np.diff(self.edges))

    @property
    def mean_under_way(self) -> float:
        """Mean number of tokens that a running answer has so far; long answers are running more often."""
        return self.mean_square / (2 * self.mean)

    def share_above(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of the answers that are longer than each of these lengths, interpolated between the quantiles."""
        found: NDArray[np.float64] = np.interp(
            lengths, self.values, 1 - (self.edges[:-1] + self.edges[1:]) / 2, left=1, right=0
        )
        return found

    def longest_of(self, count: float) -> float:
        """Expected length of the longest of `count` answers."""
        if count not in self._longest:
            self._longest[count] = float(self.values @ np.diff(self.edges ** max(1.0, count)))
        return self._longest[count]

    @cached_property
    def longest(self) -> int:
        return max(1, round(self.quantile(1.0)))


class _Form(Protocol):
    def at(self, share: float) -> float: ...

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]: ...


class _Fixed:
    def __init__(self, spec: str, text: str) -> None:
        self._length = _number(spec, text)

    def at(self, share: float) -> float:
        return self._length

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.full(count, self._length)


class _Uniform:
    def __init__(self, spec: str, text: str) -> None:
        found = _settings(spec, text, ("min", "max"))
        self._first, self._last = found["min"], found["max"]
        if self._last < self._first:
            raise InputError(f"--answer {spec}: max is less than min")

    def at(self, share: float) -> float:
        return self._first + share * (self._last - self._first)

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        return random.uniform(self._first, self._last, count)


class _LogNormal:
    def __init__(self, spec: str, text: str) -> None:
        found = _settings(spec, text, ("median", "sigma", "max"))
        self._median, self._sigma, self._max = found["median"], found["sigma"], found["max"]

    def at(self, share: float) -> float:
        if share >= 1 or not self._sigma:
            return self._max if share >= 1 else min(self._max, self._median)
        deviation = NormalDist().inv_cdf(max(1e-12, share))
        return min(self._max, self._median * math.exp(self._sigma * deviation))

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.minimum(self._max, self._median * np.exp(self._sigma * random.standard_normal(count)))


class _File:
    """Observed lengths, read from a file."""

    def __init__(self, spec: str, text: str) -> None:
        try:
            self._sorted = sorted(int(line) for line in Path(text).read_text(encoding="utf-8").split())
        except (OSError, ValueError) as error:
            raise InputError(f"--answer {spec}: cannot be read as one length on each line: {error}") from None
        if not self._sorted or self._sorted[0] < 1:
            raise InputError(f"--answer {spec}: needs at least one length, and none below 1")

    def at(self, share: float) -> float:
        return float(self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))])

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        return random.choice(np.array(self._sorted, dtype=np.float64), count)


def _refuse(spec: str, text: str) -> _Fixed:
    raise InputError(f"--answer {spec}: write {FORMS}")


_FORMS: dict[str, Callable[[str, str], _Form]] = {
    "fixed": _Fixed,
    "uniform": _Uniform,
    "lognormal": _LogNormal,
    "file": _File,
}


def _number(spec: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found >= 0):
        raise InputError(f"--answer {spec}: '{text}' is not a length; write {FORMS}")
    return found


def _settings(spec: str, text: str, names: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in names or key in found:
            raise InputError(f"--answer {spec}: cannot read '{part}'; write {FORMS}")
        found[key] = _number(spec, value)
    if missing := [name for name in names if name not in found]:
        raise InputError(f"--answer {spec}: {missing[0]} is missing; write {FORMS}")
    return found


def lognormal_with(mean: float, truncated_share: float, limit: int) -> Lengths:
    """The log-normal distribution, cut off at `limit`, with this mean and this share of answers at the limit."""
    if not 0 < mean < limit:
        raise InputError(f"lengths: no answers below {limit} tokens have a mean of {mean:g}")
    reach = NormalDist().inv_cdf(1 - min(0.999, max(1e-4, truncated_share)))
    low, high = 1e-3, 5.0  # bounds of sigma; a larger sigma gives a lower mean, since the share at the limit is fixed
    if reach <= 0:
        raise InputError(
            f"lengths: {truncated_share:.0%} of the answers reach the limit; with more than half, nothing can be fitted"
        )
    for _ in range(40):
        sigma = (low + high) / 2
        found = Lengths(f"lognormal:median={limit * math.exp(-sigma * reach):.6g},sigma={sigma:.6g},max={limit}")
        low, high = (sigma, high) if found.mean > mean else (low, sigma)
    return found
