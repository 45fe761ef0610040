"""An advantage is a reward minus the mean of its group, and exactly nothing when there is nothing to learn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.algo.advantages import group_advantages

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([3.0, 0.0, 0.0]) == [2.0, -1.0, -1.0]
    assert group_advantages([0.25]) == [0.0]
    assert group_advantages([]) == []


@given(rewards)
def test_they_sum_to_zero_and_keep_the_differences(values: list[float]) -> None:
    found = group_advantages(values)
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    for one, other in zip(found, values, strict=True):
        assert one - found[0] == pytest.approx(other - values[0], abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero_whatever_rounding_does(value: float, count: int) -> None:
    """0.1 added up ten times and divided by ten is not 0.1: the mean must not decide."""
    assert group_advantages([value] * count) == [0.0] * count


@given(rewards, st.floats(-100, 100))
def test_adding_a_constant_to_all_rewards_changes_nothing(values: list[float], constant: float) -> None:
    shifted = group_advantages([value + constant for value in values])
    assert shifted == pytest.approx(group_advantages(values), abs=1e-9)
