"""How much better a completion was than could be expected, judged by the other samples of its prompt.

Whatever the kind, equal rewards give exactly zero: there is nothing to learn from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum, sqrt

Advantages = Callable[[Sequence[float]], list[float]]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean: AIPO's."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the others: RLOO's. The baseline does not depend on the sample it is taken from."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def mean_std_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, in units of the group's standard deviation: GRPO's."""
    centred = group_advantages(rewards)
    std = sqrt(fsum(value * value for value in centred) / len(centred)) if centred else 0.0
    return [value / std for value in centred] if std else centred


def _all_equal(rewards: Sequence[float]) -> bool:
    return all(reward == rewards[0] for reward in rewards)


ADVANTAGES: dict[str, Advantages] = {
    "mean": group_advantages,
    "leave_one_out": leave_one_out_advantages,
    "mean_std": mean_std_advantages,
}

# What each loss was published with; a user's own starts from AIPO's.
_USUAL = {"rloo": "leave_one_out", "grpo": "mean_std", "cispo": "mean_std", "gspo": "mean_std"}


def advantages_for(kind: str, loss: str) -> Advantages:
    """`algo.advantage`, where `auto` follows from `algo.loss`."""
    return ADVANTAGES[_USUAL.get(loss, "mean") if kind == "auto" else kind]
