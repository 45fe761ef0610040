"""Advantages: how much better a completion was than expected, judged by the other samples of its prompt.

With every estimator, equal rewards give exactly zero: there is nothing to learn from them. A role on the line, such as a
critic, may give each token an advantage of its own instead; see `TOKEN_ADVANTAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum, sqrt

from llamarl.config import AlgoConfig
from llamarl.types import PromptGroup, Rollout, RolloutGroup, bytes_to_floats

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


def estimate_advantages(group: RolloutGroup, algo: AlgoConfig) -> list[float]:
    """The estimator's advantage of each rollout, after the penalty for answers that were cut off. Where an agent's sample has
    several branches, they count once in the group and share their sample's advantage; one that was cut off costs it the
    penalty. Several players of a sample are judged apart, each by the same player of the other samples. With a critic, it is
    the mean over the tokens of a rollout."""
    if algo.advantage == "gae":
        return [_mean(rollout.columns.get(TOKEN_ADVANTAGES, b"")) for rollout in group.rollouts]
    completions = [rollout.completion for rollout in group.rollouts]
    estimate = advantages_for(algo.advantage, algo.loss)
    if all(completion.sample is None for completion in completions):
        return estimate([_penalized(rollout, algo) for rollout in group.rollouts])
    rewards = _rewards_of_players(group, algo)
    found = {player: dict(zip(given, estimate([*given.values()]), strict=True)) for player, given in rewards.items()}
    return [found[completion.player][completion.sample] for completion in completions]


def final_rewards(group: RolloutGroup, algo: AlgoConfig) -> list[float]:
    """The reward at the end of each rollout, after the penalty for answers that were cut off."""
    completions = [rollout.completion for rollout in group.rollouts]
    if all(completion.sample is None for completion in completions):
        return [_penalized(rollout, algo) for rollout in group.rollouts]
    found = _rewards_of_players(group, algo)
    return [found[completion.player][completion.sample] for completion in completions]


def _rewards_of_players(group: RolloutGroup, algo: AlgoConfig) -> dict[int, dict[int | None, float]]:
    """The reward of each sample, by player; all its branches share it."""
    rewards: dict[int, dict[int | None, float]] = {}
    for rollout in group.rollouts:
        of_player, sample = rewards.setdefault(rollout.completion.player, {}), rollout.completion.sample
        of_player[sample] = min(of_player.get(sample, rollout.reward), _penalized(rollout, algo))
    return rewards


def _mean(column: bytes) -> float:
    return float(bytes_to_floats(column).mean()) if column else 0.0


def _penalized(rollout: Rollout, algo: AlgoConfig) -> float:
    return rollout.reward - algo.cut_off_penalty if rollout.completion.truncated else rollout.reward


def why_left_out(rollout: Rollout, *, flat: bool, algo: AlgoConfig, prompt: PromptGroup | None = None) -> str:
    """Why an update does not learn from a rollout; empty if it does. `flat`: all advantages of its group are zero, which
    matters neither to a teacher nor to data."""
    taught = prompt is not None and (bool(prompt.teacher) or prompt.written is not None)
    if flat and algo.zero_variance == "skip" and not taught:
        return "all answers of its group have the same reward (algo.zero_variance=skip)"
    if algo.overlong == "mask" and rollout.completion.truncated:
        return "cut off (algo.overlong=mask)"
    return "" if rollout.completion.num_tokens else "no tokens"
