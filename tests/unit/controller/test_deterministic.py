"""Deterministic mode: whatever the order of events and whoever dies, each batch is sampled by the one version laid down."""

from __future__ import annotations

import pytest
from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev


def schedule(staleness: int, groups: int = 3, attempts: int = 99) -> ScheduleConfig:
    return ScheduleConfig(
        updates=8,
        groups_per_update=groups,
        samples_per_group=2,
        max_staleness=staleness,
        deterministic=True,
        probe_every=3,
        max_restarts=99,
        max_attempts=attempts,
    )


EXECUTORS = ["generator/0", "generator/1", "reward/0", "trainer/0"]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 2), st.integers(2, 9), st.integers(0, 3))
def test_each_batch_is_sampled_by_its_version_whatever_happens(
    data: st.DataObject, staleness: int, replicas: int, capacity: int, save_every: int
) -> None:
    """The world checks every admission, every load and every batch; capacities are too small for a batch at times."""
    line = standard_line(replicas=replicas, capacity=capacity)
    world = World(line, schedule(staleness), prompts=2, every=3, save_every=save_every)
    alive = [name for name in EXECUTORS if replicas == 2 or name != "generator/1"]
    kills = 0
    while world.end is None:
        assert world.outstanding, "deadlock"
        if kills < 5 and data.draw(st.integers(0, 12)) == 0:
            kills += 1
            world.kill(data.draw(st.sampled_from(alive)))
        else:
            world.complete(data.draw(st.integers(0, len(world.outstanding) - 1)))
    world.check_end()
    assert [one.version for one in world.evaluated] == [0, 3, 6, 8], (
        "a round was answered by another version than was due"
    )
    for update, ordinals in world.trained_batches:
        assert ordinals == tuple(range(3 * update, 3 * update + 3))
        assert {world.first_version[ordinal] for ordinal in ordinals} == {max(0, update - staleness)}


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_snapshot_waits_for_the_groups_that_it_could_not_make_again(staleness: int) -> None:
    world = World(standard_line(replicas=2, capacity=4), schedule(staleness), save_every=1)
    settled: set[int] = set()
    while world.end is None:
        command = world.outstanding[-1]
        before = len(world.commands)
        if isinstance(command, ev.RunGroup) and command.executor == "reward/0":
            settled.add(command.ordinal)
        world.complete(len(world.outstanding) - 1)
        for commit in world.commands[before:]:
            if isinstance(commit, ev.Commit):
                assert settled >= set(range(min(3 * (commit.version + staleness), 24)))
    world.check_end()


def test_a_stop_on_request_finishes_what_its_snapshot_needs() -> None:
    world = World(standard_line(capacity=2), schedule(2), save_every=0)
    while world.newest < 3:
        world.complete(0)
    world.feed(ev.StopRequested())
    world.run(lambda count: 0)
    assert isinstance(world.end, ev.Finish)
    assert world.end.stopped


def test_a_group_that_keeps_killing_its_executor_stops_the_job_instead_of_being_dropped() -> None:
    world = World(standard_line(), schedule(1, attempts=2))
    while world.end is None:
        if world.held_groups.get("generator/0"):
            world.kill("generator/0")
        else:
            world.complete(0)
    assert isinstance(world.end, ev.Abort)
    assert "its executor died 2 times" in world.end.reason


def test_a_probe_that_keeps_killing_its_executor_is_done_without_and_holds_up_nothing() -> None:
    world = World(standard_line(capacity=2), schedule(1, attempts=3))  # one group at a time: no other dies with it
    while world.end is None:
        assert world.outstanding, "deadlock"
        if any(world.kinds[ordinal] == "probe" for ordinal in world.held_groups.get("generator/0", ())):
            world.kill("generator/0")
        else:
            world.complete(0)
    world.check_end()
