"""Advantages: how much better a completion was than expected, judged by the other samples of its prompt.

With every estimator, equal rewards give exactly zero: there is nothing to learn from them. A role on the line, such as a
critic, may give each token an advantage of its own instead; see `TOKEN_ADVANTAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum, sqrt

Advantages = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group to the advantage of each completion."""

TOKEN_ADVANTAGES = (
    "advantages"  # the column of a rollout that replaces the estimator's value, one number per sampled token
)


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, as in AIPO."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the others, as in RLOO. The baseline does not depend on the sample itself."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def mean_std_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, in units of the group's standard deviation, as in GRPO."""
    centered = group_advantages(rewards)
    std = sqrt(fsum(value * value for value in centered) / len(centered)) if centered else 0.0
    return [value / std for value in centered] if std else centered


def _all_equal(rewards: Sequence[float]) -> bool:
    return all(reward == rewards[0] for reward in rewards)


ADVANTAGES: dict[str, Advantages] = {
    "mean": group_advantages,
    "leave_one_out": leave_one_out_advantages,
    "mean_std": mean_std_advantages,
}

# The estimator that each loss was published with; a loss of the user's starts with AIPO's.
_USUAL = {"rloo": "leave_one_out", "grpo": "mean_std", "cispo": "mean_std", "gspo": "mean_std"}


def advantages_for(kind: str, loss: str) -> Advantages:
    """The estimator that `algo.advantage` names; `auto` follows from `algo.loss`."""
    return ADVANTAGES[_USUAL.get(loss, "mean") if kind == "auto" else kind]
