"""Generalized advantage estimation: from the values of a critic to the advantage of each sampled token, and to its target.

A token's value is that of the state before it. The reward comes with the last token, and nothing is worth anything after it.
Replies of tools are no tokens here: what follows a token is the next sampled one, whose state has read the reply.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

VALUES = "values"  # the column that a critic adds to rollouts beside their advantages
RETURNS = "returns"  # its own targets
_EQUAL = 1e-6  # deviation of advantages that differ by rounding only


def gae(values: Floats, reward: float, *, gamma: float, decay: float) -> Floats:
    """The advantages of an answer's tokens: A_t = delta_t + gamma * decay * A_t+1, with delta_t = r_t + gamma * V_t+1 - V_t.
    `decay` is GAE's lambda: 1 compares the whole return with the value, 0 only the next step."""
    advantages = np.empty(len(values), dtype=np.float32)
    following, advantage = 0.0, 0.0
    numbers = values.tolist()
    for at in range(len(numbers) - 1, -1, -1):
        gained = reward if at == len(numbers) - 1 else 0.0
        delta = gained + gamma * following - numbers[at]
        advantage = delta + gamma * decay * advantage
        following, advantages[at] = numbers[at], advantage
    return advantages


def whitened(advantages: Sequence[Floats]) -> list[Floats]:
    """The advantages of all answers with mean 0 and deviation 1 over all tokens: a critic that is off for all of them then
    neither praises nor blames them all. Equal ones become 0."""
    if not advantages:
        return []
    every = np.concatenate(advantages).astype(np.float64)
    mean, deviation = every.mean(), every.std()
    scale = deviation if deviation > _EQUAL else 1.0
    return [((one - mean) / scale).astype(np.float32) for one in advantages]


def explained_variance(values: Sequence[Floats], returns: Sequence[Floats]) -> float | None:
    """1 - Var(returns - values) / Var(returns) over all tokens: 1 is a perfect critic, 0 one that knows the mean only. None
    if the returns do not differ."""
    expected, found = np.concatenate(values).astype(np.float64), np.concatenate(returns).astype(np.float64)
    spread = found.var()
    return float(1.0 - (found - expected).var() / spread) if spread > 0 else None
