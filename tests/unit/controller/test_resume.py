"""A job that was killed goes on: the same batches, nothing lost, nothing counted twice, and the bound still holds."""

from __future__ import annotations

from random import Random

from helpers.world import World, standard_line
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.ledger_state import LedgerState, audit
from llamarl.controller.recovery import resumption


def rules(staleness: int = 1, window: int = 1, groups: int = 2, updates: int = 8) -> ScheduleConfig:
    return ScheduleConfig(
        updates=updates, groups_per_update=groups, samples_per_group=2, max_staleness=staleness, window=window
    )


def scored(world: World) -> set[int]:
    """What the store holds: every group that has passed the last group role and is not forgotten."""
    last = world.line.group_roles[-1].done
    passed = {r.ordinal for r in world.records if isinstance(r, ledger.Passed) and r.state == last}
    return passed - world.forgotten


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 3),
    window=st.integers(1, 6),
    steps=st.integers(0, 150),
    losses=st.integers(0, 3),
)
@example(seed=2, staleness=3, groups=3, window=2, steps=68, losses=3)  # the store's end was lost, the ledger's was not
def test_a_killed_job_goes_on_from_its_snapshot_and_ends_clean(
    seed: int, staleness: int, groups: int, window: int, steps: int, losses: int
) -> None:
    random = Random(seed)
    schedule = rules(staleness, min(window, (staleness + 1) * groups), groups)
    first = World(standard_line(replicas=2), schedule, save_every=2)
    for _ in range(steps):
        if first.end is None:
            fail = "unscorable" if random.random() < 0.05 else ""
            first.complete(random.randrange(len(first.outstanding)), fail)
    store = scored(first)
    for _ in range(losses):  # the end of the store may not have reached the disk
        store.discard(max(store, default=-1))
    version = first.controller.snapshots.saved
    resumed = resumption(LedgerState.of(first.records), store, version, evaluated=())
    second = World(standard_line(), schedule, save_every=2, begin=resumed)
    second.records[:0] = first.records
    second.first_version = {**first.first_version}
    while second.end is None:
        assert second.outstanding, "deadlock"
        second.complete(random.randrange(len(second.outstanding)))
    second.check_end()
    made_before = dict(first.trained_batches)
    for update, batch in second.trained_batches[: len(resumed.batches)]:
        assert batch == made_before[update], "the same batches in the same order"


def test_what_was_scored_is_not_generated_again() -> None:
    first = World(standard_line(capacity=100), rules(updates=4), save_every=1)
    while first.controller.snapshots.saved < 1:
        first.complete(0)
    store = scored(first)
    second = World(
        standard_line(capacity=100), rules(updates=4), begin=resumption(LedgerState.of(first.records), store, 1, ())
    )
    second.first_version = {**first.first_version}
    second.run(lambda count: 0)
    generated_again = {c.ordinal for c in second.commands if isinstance(c, ev.RunGroup) and "generator" in c.executor}
    assert generated_again.isdisjoint(store)
    assert generated_again | store >= set(range(2, 8))


def test_a_request_to_stop_finishes_the_update_saves_and_ends() -> None:
    world = World(standard_line(), rules())
    while not any(isinstance(c, ev.RunBatch) for c in world.outstanding):
        world.complete(0)
    world.feed(ev.StopRequested())
    world.run(lambda count: 0)
    assert world.end == ev.Finish(stopped=True)
    assert ev.Committed(1) in world.history
    assert world.controller.training.trained == 1
    assert not audit(world.records).clean, "groups under way are left for the resumed job"


def test_a_stop_with_nothing_new_to_save_ends_at_once() -> None:
    world = World(standard_line(), rules())
    world.feed(ev.StopRequested())
    assert world.end == ev.Finish(stopped=True)


def test_a_snapshot_that_fails_stops_nothing_but_the_last_one_ends_the_job_loudly() -> None:
    world = World(standard_line(), rules(updates=4), save_every=1)
    while world.end is None:
        command = world.outstanding[0]
        if isinstance(command, ev.Commit):
            world.outstanding.pop(0)
            world.feed(ev.SaveFailed(command.version, "No space left on device"))
        else:
            world.complete(0)
    assert world.controller.training.trained == 4
    assert isinstance(world.end, ev.Abort)
    assert "No space left on device" in world.end.reason


def test_a_group_that_kills_whoever_holds_it_is_dropped() -> None:
    world = World(standard_line(capacity=2), rules())
    while world.end is None:
        poison = [c for c in world.outstanding if isinstance(c, ev.RunGroup) and c.ordinal == 3]
        if poison:
            world.kill(poison[0].executor)
        else:
            world.complete(0)
    world.check_end()
    assert any("its executor died 3 times" in reason for reason in audit(world.records).dropped)
