"""Statistics of evaluations: unbiased pass@k, and confidence intervals that hold for few problems too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
_Z = 1.959964  # normal quantile for 95%
_RESAMPLES = 2000


def wilson(successes: float, trials: int) -> Interval:
    """Return the 95% interval of a share; it is sound even at 0 and 1."""
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, _Z * _Z
    center = share + z2 / (2 * trials)
    spread = _Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the chance that at least one of k samples, drawn without replacement, is right (Chen et al. 2021)."""
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod((samples - right - i) / (samples - i) for i in range(k))


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the 95% interval of a mean over problems, by resampling them with a fixed seed."""
    if not values:
        return 0.0, 1.0
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
