"""Executors that join a running job and leave it: groups are accounted for, bounds hold, and nobody waits for them."""

from __future__ import annotations

from random import Random

import pytest
from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.controller import MAX_FAILED_LOADS, Controller
from llamarl.controller.ledger_state import audit
from llamarl.controller.replay import replay, setting_of
from llamarl.types import GroupFacts

NUM_GUESTS = 3


def schedule(updates: int = 6, groups: int = 3, staleness: int = 1, restarts: int = 1000) -> ScheduleConfig:
    return ScheduleConfig(
        updates=updates,
        groups_per_update=groups,
        samples_per_group=2,
        max_staleness=staleness,
        max_restarts=restarts,
        max_attempts=3,
        probe_every=2,
    )


def play(seed: int, *, own: int, staleness: int, groups: int, capacity: int, saves: int) -> World:
    """A job in which guests join, leave, die and come again at random. None of its own replicas may be there."""
    rules = schedule(8, groups, staleness)
    world = World(standard_line(replicas=own, capacity=capacity), rules, prompts=2, every=3, save_every=saves)
    random, there, changes = Random(seed), set[str](), 0
    while world.end is None:
        assert changes < 500, "the job does not end"
        dice = random.random()
        if not world.outstanding or (dice < 0.10 and changes < 60):  # with nothing under way, a guest must come
            guest = f"generator/{own + random.randrange(NUM_GUESTS)}"
            changes += 1
            if guest not in there:
                there.add(guest)
                world.join(guest)
            elif random.random() < 0.7:
                there.remove(guest)
                world.leave(guest)
        elif dice < 0.14 and any(_may_repeat(world, event) for event in world.history):
            world.feed(random.choice([event for event in world.history if _may_repeat(world, event)]))
        else:
            world.complete(random.randrange(len(world.outstanding)))
    return world


def _may_repeat(world: World, event: ev.AnyEvent) -> bool:
    """Whether the event may arrive late or twice. Who joins and leaves is told once; a probe may be asked again."""
    of_probe = isinstance(event, ev.GroupDone) and world.kinds[event.ordinal] == "probe"
    return isinstance(event, ev.ExecutorEvent) and not of_probe


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    own=st.integers(0, 2),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    capacity=st.integers(2, 7),
    saves=st.integers(0, 3),
)
def test_bounds_hold_and_nothing_is_lost_while_executors_come_and_go(
    seed: int, own: int, staleness: int, groups: int, capacity: int, saves: int
) -> None:
    world = play(seed, own=own, staleness=staleness, groups=groups, capacity=capacity, saves=saves)
    world.check_end()
    assert not audit(world.records).dropped, "a host that leaves is no reason to drop a group"


def test_a_group_that_is_lost_with_a_guest_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "_wait_again", lambda self, group, position: None)
    noticed = 0
    for seed in range(20):
        try:
            play(seed, own=1, staleness=1, groups=3, capacity=4, saves=0).check_end()
        except (AssertionError, KeyError):
            noticed += 1
    assert noticed


def started(own: int = 1, **rules: int) -> World:
    world = World(standard_line(replicas=own, capacity=4), schedule(**rules))
    while any(isinstance(command, ev.Start | ev.Publish | ev.Load) for command in world.outstanding):
        kinds = [isinstance(command, ev.Start | ev.Publish | ev.Load) for command in world.outstanding]
        world.complete(kinds.index(True))
    return world


def bring_up(world: World, guest: str) -> None:
    world.join(guest)
    for kind in (ev.Start, ev.Load):
        index = next(at for at, one in enumerate(world.outstanding) if isinstance(one, kind) and one.executor == guest)
        world.complete(index)


def test_a_guest_loads_the_newest_weights_takes_groups_and_gives_them_back() -> None:
    world = started()
    bring_up(world, "generator/1")
    held = set(world.held_groups["generator/1"])
    assert held, "it takes groups that the others have no room for"
    world.leave("generator/1")
    world.run(lambda count: 0)
    world.check_end()
    issued = [record for record in world.records if isinstance(record, ledger.Issued) and record.ordinal in held]
    assert {record.executor for record in issued} == {"generator/0", "generator/1"}, "the record says who had them"


def test_a_guest_that_leaves_is_never_started_again_by_the_job_and_joins_with_its_next_incarnation() -> None:
    world = started()
    bring_up(world, "generator/1")
    before = len(world.commands)
    world.leave("generator/1")
    world.leave("generator/1")
    assert not [c for c in world.commands[before:] if getattr(c, "executor", "") == "generator/1"]
    facts = GroupFacts(1, 0, 0, 0.5)
    world.feed(ev.GroupDone("generator/1", 0, 0, facts))  # late, and void
    world.join("generator/1")
    assert ev.Start("generator/1", 1, 0) in world.commands[before:]


def test_without_any_generator_the_job_waits_and_goes_on_with_the_next_one() -> None:
    world = World(standard_line(replicas=0, capacity=4), schedule())
    while world.outstanding:
        world.complete(0)
    assert world.end is None and world.newest == 0, "the trainer and the reward wait"
    bring_up(world, "generator/0")
    while world.trained_batches == []:
        world.complete(0)
    world.leave("generator/0")
    while world.outstanding:
        world.complete(0)
    assert world.end is None
    bring_up(world, "generator/1")
    world.run(lambda count: 0)
    world.check_end()


def test_a_guest_that_cannot_load_weights_is_sent_away_and_the_job_goes_on() -> None:
    world = started()
    bring_up(world, "generator/1")
    while world.newest < 1:
        world.complete(next(at for at, one in enumerate(world.outstanding) if not isinstance(one, ev.Load)))
    for _ in range(MAX_FAILED_LOADS):
        load = next(one for one in world.outstanding if isinstance(one, ev.Load) and one.executor == "generator/1")
        world.outstanding.remove(load)
        world.feed(ev.LoadFailed("generator/1", 0, load.version, "does not match its checksum"))
    assert ev.Dismiss("generator/1", 0, "does not match its checksum") in world.commands
    world.run(lambda count: 0)
    world.check_end()


def test_a_guest_that_dies_again_and_again_is_sent_away_and_one_of_our_own_ends_the_job() -> None:
    world = started(restarts=2)
    world.join("generator/1")
    for _ in range(3):
        world.kill("generator/1")
    sent_away = [command for command in world.commands if isinstance(command, ev.Dismiss)]
    assert [command.reason for command in sent_away] == ["generator/1 died 3 times in a row, the last time: killed"]
    assert world.end is None
    for _ in range(3):
        world.kill("generator/0")
    assert isinstance(world.end, ev.Abort)


def test_the_event_log_replays_guests() -> None:
    from msgspec.json import encode

    world = play(7, own=1, staleness=1, groups=2, capacity=4, saves=2)
    fresh = World(world.line, world.schedule, prompts=2, every=3, save_every=2).controller
    lines = [encode(setting_of(fresh)), *map(encode, world.history)]
    assert any(isinstance(event, ev.Left) for event in world.history)
    found = replay({0: lines}, world.records)
    assert not found.difference and found.num_records == len(world.records)
