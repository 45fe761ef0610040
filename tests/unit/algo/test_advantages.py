"""An advantage says how much better than its group a completion was, and exactly nothing when there is nothing to learn."""

from __future__ import annotations

import statistics

import pytest
from helpers.groups import completion, prompt_group
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamarl.algo.advantages import (
    ADVANTAGES,
    Advantages,
    advantages_for,
    estimate_advantages,
    group_advantages,
    leave_one_out_advantages,
    mean_std_advantages,
)
from llamarl.config import AlgoConfig
from llamarl.types import Rollout, RolloutGroup, has_same_rewards

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)
KINDS = pytest.mark.parametrize("kind", ADVANTAGES.values(), ids=ADVANTAGES)


def test_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([3.0, 0.0, 0.0]) == [2.0, -1.0, -1.0]
    assert leave_one_out_advantages([3.0, 0.0, 0.0]) == [3.0, -1.5, -1.5]
    assert mean_std_advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    for kind in ADVANTAGES.values():
        assert kind([0.25]) == [0.0]
        assert kind([]) == []


@given(rewards)
def test_they_sum_to_zero_and_keep_the_differences(values: list[float]) -> None:
    found = group_advantages(values)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    for one, other in zip(found, values, strict=True):
        assert one - found[0] == pytest.approx(other - values[0], abs=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(values: list[float]) -> None:
    for index, found in enumerate(leave_one_out_advantages(values)):
        others = values[:index] + values[index + 1 :]
        assert found == pytest.approx(values[index] - statistics.mean(others), abs=1e-9)


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=16).filter(lambda values: len(set(values)) > 1))
def test_mean_std_has_the_spread_of_one(values: list[int]) -> None:
    found = mean_std_advantages([float(value) for value in values])
    assert statistics.pstdev(found) == pytest.approx(1.0)
    assert statistics.mean(found) == pytest.approx(0.0, abs=1e-9)


@KINDS
@given(value=st.floats(-1e6, 1e6), count=st.integers(1, 16))
def test_equal_rewards_give_exactly_zero_whatever_rounding_does(kind: Advantages, value: float, count: int) -> None:
    """0.1 added up ten times and divided by ten is not 0.1: the mean must not decide."""
    assert kind([value] * count) == [0.0] * count


@given(rewards, st.floats(-100, 100))
def test_adding_a_constant_to_all_rewards_changes_nothing(values: list[float], constant: float) -> None:
    shifted = group_advantages([value + constant for value in values])
    assert shifted == pytest.approx(group_advantages(values), abs=1e-9)


def test_each_loss_comes_with_the_advantage_it_was_published_with_unless_another_is_asked_for() -> None:
    assert advantages_for("auto", "aipo") is advantages_for("auto", "my_losses.py:mine") is group_advantages
    assert advantages_for("auto", "rloo") is leave_one_out_advantages
    assert advantages_for("auto", "grpo") is advantages_for("auto", "gspo") is mean_std_advantages
    assert advantages_for("leave_one_out", "grpo") is leave_one_out_advantages


def played(sample: int, player: int, reward: float, *, truncated: bool = False) -> Rollout:
    return Rollout(replace(completion([1]), sample=sample, player=player, truncated=truncated), reward)


def test_players_are_judged_by_the_same_player_of_other_samples() -> None:
    """The first player of a game that it always wins has learned nothing from winning."""
    rollouts = (played(0, 0, 1.0), played(0, 1, -1.0), played(1, 0, 1.0), played(1, 1, -0.5), played(1, 1, -0.5))
    group = RolloutGroup(prompt_group([1]), rollouts)
    assert estimate_advantages(group, AlgoConfig()) == [0.0, -0.25, 0.0, 0.25, 0.25]
    assert estimate_advantages(group, AlgoConfig(loss="rloo")) == [0.0, -0.5, 0.0, 0.5, 0.5]
    assert not has_same_rewards(group)
    always = RolloutGroup(prompt_group([1]), (*rollouts[:3], played(1, 1, -1.0)))
    assert estimate_advantages(always, AlgoConfig()) == [0.0] * 4
    assert has_same_rewards(always)
    cut_off = RolloutGroup(prompt_group([1]), (*rollouts[:3], played(1, 1, -1.0, truncated=True)))
    assert not has_same_rewards(cut_off, cut_off_penalty=0.5)


def test_a_player_that_only_one_sample_has_teaches_nothing() -> None:
    group = RolloutGroup(prompt_group([1]), (played(0, 0, 1.0), played(1, 0, 0.0), played(1, 1, 5.0)))
    for loss in ("aipo", "rloo", "grpo"):
        assert estimate_advantages(group, AlgoConfig(loss=loss))[2] == 0.0
