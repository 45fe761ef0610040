"""How much better a completion was than could be expected: AIPO's baseline is the mean of the prompt's own samples."""

from __future__ import annotations

from collections.abc import Sequence


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean; exactly zero for all when the rewards are equal."""
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
