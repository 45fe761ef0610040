"""Simulated chaos breaks no rule; and it would notice if the controller did."""

from __future__ import annotations

import pytest
from helpers.chaos import MIN_EVENTS, MIN_FAULTS, play

from llamarl.config import ScheduleConfig
from llamarl.controller.controller import Controller
from llamarl.controller.pool import ExecutorPool
from llamarl.controller.window import Window


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_no_rule_is_broken_by_delays_duplicates_deaths_and_hangs(first: int) -> None:
    for seed in range(first, first + 50):
        chaos = play(seed)
        assert len(chaos.history) >= MIN_EVENTS
        assert chaos.faults >= MIN_FAULTS


def broken(seeds: int = 60) -> bool:
    for seed in range(seeds):
        try:
            play(seed)
        except (AssertionError, KeyError):
            return True
    return False


def test_a_place_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ScheduleConfig.num_places.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(ScheduleConfig, "num_places", property(lambda schedule: places(schedule) + 1))
    # The bound that the world holds batches against must stay the true one.
    monkeypatch.setattr(
        ScheduleConfig,
        "staleness_bound",
        property(lambda s: (places(s) + s.window - 2) // s.groups_per_update),
    )
    assert broken()


def test_a_batch_out_of_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Window.__init__
    monkeypatch.setattr(Window, "__init__", lambda self, size, width, out: init(self, size, width + 9, out))
    assert broken()


def test_a_group_that_is_lost_with_its_executor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "_return", lambda self, ordinal, position, reason: None)
    assert broken()


def test_a_group_given_to_a_stale_generator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ExecutorPool, "_available", staticmethod(lambda executor, version: executor.up and executor.version >= 0)
    )
    assert broken()
