"""Snapshots and what is heard twice: neither may leave a version unpublished, or publish one two times."""

from __future__ import annotations

from collections.abc import Callable

from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import ScheduleConfig, SnapshotsConfig
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.line import Role
from llamarl.controller.snapshot_schedule import SnapshotSchedule
from llamarl.controller.version_policy import NewestVersion


def world_of(updates: int = 5) -> World:
    schedule = ScheduleConfig(
        updates=updates, groups_per_update=1, samples_per_group=2, max_staleness=2, max_restarts=9
    )
    return World(standard_line(capacity=100), schedule, save_every=2)


def run_until(world: World, reached: Callable[[], bool], *, but: type[ev.Command]) -> None:
    """Do everything that is asked, except the commands of one kind."""
    while not reached():
        world.complete(next(i for i, c in enumerate(world.outstanding) if not isinstance(c, but)))


def unpublished_and_saved() -> World:
    """Version 1 is made and saved, but not published: the snapshot is ahead of what anybody can see."""
    world = world_of()
    run_until(world, lambda: world.newest == 0, but=ev.Save)
    run_until(world, lambda: ev.Committed(2) in world.history, but=ev.Publish)
    assert world.newest == 0
    return world


def test_a_trainer_that_dies_before_its_saved_version_is_visible_goes_back_to_a_visible_one() -> None:
    world = unpublished_and_saved()
    assert world.controller.training.trained == 2
    world.kill("trainer/0")
    assert ledger.Rewound(0, "trainer/0") in world.records
    world.run(lambda count: 0)
    world.check_end()
    assert [record.version for record in world.records if isinstance(record, ledger.Visible)] == [0, 1, 2, 3, 4, 5]


def test_a_snapshot_counts_once_its_version_is_visible() -> None:
    world = unpublished_and_saved()
    assert world.controller.snapshots.saved == 0
    assert not world.forgotten, "its groups may still be needed"
    run_until(world, lambda: world.newest == 2, but=ev.Load)
    assert world.controller.snapshots.saved == 2
    assert world.forgotten == {0, 1}


def test_a_trainer_heard_to_have_started_twice_publishes_every_version_once() -> None:
    world = world_of()
    started = ev.Started("trainer/0", 0)
    run_until(world, lambda: started in world.history, but=ev.Save)
    world.feed(started)
    world.run(lambda count: 0)
    published = [event.version for event in world.history if isinstance(event, ev.Published)]
    assert published == [0, 1, 2, 3, 4, 5]


def saved_by(world: World) -> list[int]:
    return [event.version for event in world.history if isinstance(event, ev.Committed)]


def test_none_at_the_end_means_none_unless_the_job_is_stopped_before() -> None:
    schedule = ScheduleConfig(updates=5, groups_per_update=1, samples_per_group=2, max_staleness=2)
    ended, stopped = (World(standard_line(capacity=100), schedule, at_end="none") for _ in range(2))
    ended.run(lambda count: 0)
    run_until(stopped, lambda: stopped.newest == 2, but=ev.Save)
    stopped.feed(ev.StopRequested())
    stopped.run(lambda count: 0)
    assert saved_by(ended) == []
    assert len(saved_by(stopped)) == 1, "who is stopped will go on, and needs a snapshot"


def test_the_answer_to_a_commit_that_was_given_up_is_not_taken_for_that_of_the_next() -> None:
    """A role died meanwhile, so it needs groups that the older snapshot would say nobody needs."""
    snapshots = SnapshotSchedule(SnapshotsConfig(every=2), NewestVersion())

    def save(role: str, reached: dict[str, int]) -> None:
        snapshots.made(role, reached)
        assert snapshots.next_part(role) == 2
        snapshots.part_saved(role, 2)

    save("critic", {"critic": 2, "trainer": 1})
    save("trainer", {"critic": 3, "trainer": 2})
    assert snapshots.next_commit({"critic": 2, "trainer": 2}, assembled=6) == 2
    snapshots.rewind("trainer")
    snapshots.rewind("critic")
    snapshots.made("trainer", {"critic": 0, "trainer": 2})
    assert snapshots.version == 2, "it is saved again"
    assert not snapshots.committed(2)
    assert snapshots.count(newest=2) == range(0) and snapshots.saved == 0
    assert snapshots.next_part("trainer") == 2
    snapshots.part_saved("trainer", 2)
    save("critic", {"critic": 2, "trainer": 2})
    assert snapshots.next_commit({"critic": 2, "trainer": 2}, assembled=6) == 2
    assert snapshots.committed(2) and snapshots.count(newest=2) == range(2)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_with_two_roles_that_train_every_snapshot_is_whole_and_none_holds_up_the_end(
    data: st.DataObject, save_every: int
) -> None:
    """The second role may make a version that is due when the first has gone on without saving it."""
    schedule = ScheduleConfig(updates=6, groups_per_update=1, samples_per_group=2, max_staleness=2, max_restarts=9)
    critic = Role(name="critic", unit="batch", done="valued")
    world = World(standard_line(capacity=100, extra=[critic]), schedule, save_every=save_every)
    kills, parts = 0, dict[int, set[str]]()
    while world.end is None:
        assert world.outstanding, "deadlock"
        if kills < 2 and data.draw(st.integers(0, 20)) == 0:
            kills += 1
            world.kill(data.draw(st.sampled_from(["critic/0", "trainer/0"])))
            continue
        world.complete(data.draw(st.integers(0, len(world.outstanding) - 1)))
        match said := world.history[-1]:
            case ev.Saved():
                parts.setdefault(said.version, set()).add(said.executor)
            case ev.Committed():
                assert parts[said.version] == {"critic/0", "trainer/0"}
    world.check_end()
    assert 6 in saved_by(world)
