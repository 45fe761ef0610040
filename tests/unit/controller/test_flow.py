"""The rules of the flow hold whatever the timing: checked by a world that sees only events and commands."""

from __future__ import annotations

from random import Random

import pytest
from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.ledger_state import audit
from llamarl.controller.line import Channel, Line, Role
from llamarl.errors import ConfigError


def schedule(
    updates: int = 6, places: int = 3, staleness: int = 1, window: int = 1, restarts: int = 1000
) -> ScheduleConfig:
    return ScheduleConfig(
        updates=updates,
        groups_per_update=places,
        samples_per_group=2,
        max_staleness=staleness,
        window=window,
        max_restarts=restarts,
    )


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    window=st.integers(1, 8),
    replicas=st.integers(1, 3),
    capacity=st.integers(2, 7),
    prompts=st.integers(0, 3),
    trainer_restarts=st.booleans(),
    saves=st.integers(0, 3),
)
def test_bounds_hold_under_random_timing_deaths_and_duplicates(
    seed: int,
    staleness: int,
    groups: int,
    window: int,
    replicas: int,
    capacity: int,
    prompts: int,
    trainer_restarts: bool,
    saves: int,
) -> None:
    rules = schedule(5, groups, staleness, min(window, (staleness + 1) * groups))
    line = standard_line(replicas=replicas, capacity=capacity, trainer_restarts=trainer_restarts)
    world = World(line, rules, prompts=prompts, every=2 if prompts else 0, save_every=saves)
    random = Random(seed)
    mortal = [name for name in world.controller.executors if trainer_restarts or name != "trainer/0"]
    deaths = 0
    while world.end is None:
        assert world.outstanding, "deadlock"
        dice = random.random()
        if dice < 0.03 and deaths < 20:
            deaths += 1
            world.kill(random.choice(mortal))
        elif dice < 0.08:
            world.feed(random.choice(world.history[1:] or [ev.Committed(0)]))
        elif dice < 0.10 and world.controller.snapshots.version not in (None, 5):
            world.feed(ev.SaveFailed(world.controller.snapshots.version or 0, "disk full"))
        else:
            fail = "unscorable" if random.random() < 0.02 else ""
            world.complete(random.randrange(len(world.outstanding)), fail)
    world.check_end()
    expected = {0, 2, 4, 5} if prompts else set()
    assert len(world.evaluated) == len(expected)


@given(staleness=st.integers(0, 3), groups=st.integers(1, 4))
def test_in_order_batches_are_consecutive_ordinals(staleness: int, groups: int) -> None:
    world = World(standard_line(replicas=2), schedule(4, groups, staleness))
    world.run(lambda count: count - 1)  # always the youngest: the worst order
    assert world.trained_batches == [(u, tuple(range(u * groups, (u + 1) * groups))) for u in range(4)]


def test_the_in_order_bound_is_max_staleness_and_is_reached() -> None:
    for staleness in range(4):
        rules = schedule(8, 3, staleness)
        assert rules.staleness_bound == staleness
        world = World(standard_line(capacity=100), rules)
        seen = []

        def prefer_generation(count: int, world: World = world) -> int:
            order = (ev.Start, ev.Load, ev.RunGroup, ev.Publish, ev.RunBatch, ev.Save, ev.Commit)
            kinds = [type(command) for command in world.outstanding]
            return next(kinds.index(kind) for kind in order if kind in kinds)

        world.run(prefer_generation)
        for update, ordinals in world.trained_batches:
            seen.append(max(update - world.first_version[ordinal] for ordinal in ordinals))
        assert max(seen) == staleness


def test_a_window_lets_younger_groups_pass_a_slow_one() -> None:
    world = World(standard_line(capacity=100), schedule(4, 2, staleness=1, window=3))

    def leave_group_0(count: int) -> int:
        slow = [isinstance(c, ev.RunGroup) and c.ordinal == 0 for c in world.outstanding]
        return slow.index(False) if False in slow else 0

    world.run(leave_group_0)
    assert world.trained_batches[0] == (0, (1, 2))
    assert 0 in world.trained_batches[1][1]


def test_a_place_is_freed_by_publication_not_by_training() -> None:
    world = World(standard_line(capacity=100), schedule(3, 2, staleness=0))
    while not world.trained_batches:
        world.complete(0)
    batch = next(i for i, c in enumerate(world.outstanding) if isinstance(c, ev.RunBatch))
    world.complete(batch)
    assert world.controller.next_ordinal == 2, "trained, but the version is not published yet"
    publish = next(i for i, c in enumerate(world.outstanding) if isinstance(c, ev.Publish))
    world.complete(publish)
    assert world.controller.places_used == 0
    assert world.controller.next_ordinal == 2, "published, but no replica holds the new version yet"
    load = next(i for i, c in enumerate(world.outstanding) if isinstance(c, ev.Load))
    world.complete(load)
    assert world.controller.next_ordinal == 4


def test_a_restarted_generator_loads_weights_before_it_serves() -> None:
    world = World(standard_line(), schedule())
    while world.controller.next_ordinal == 0:
        world.complete(0)
    held = sorted(world.held_groups["generator/0"])
    assert held
    world.kill("generator/0")
    said: list[ev.AnyCommand] = []
    while not any(isinstance(c, ev.RunGroup) and c.executor == "generator/0" for c in world.outstanding):
        said += [c for c in world.outstanding if getattr(c, "executor", "") == "generator/0"]
        world.complete(next(i for i, c in enumerate(world.outstanding) if getattr(c, "executor", "") == "generator/0"))
    assert [type(command) for command in said] == [ev.Start, ev.Load]
    assert world.held_groups["generator/0"] == set(held), "its groups are handed out again under the same ordinals"


def test_a_trainer_that_dies_trains_the_same_batches_again() -> None:
    world = World(standard_line(), schedule(6), save_every=2)
    while world.controller.training.trained < 3:
        world.complete(0)
    before = dict(world.trained_batches)
    world.kill("trainer/0")
    assert ledger.Rewound(2, "trainer/0") in world.records
    start = next(c for c in world.outstanding if isinstance(c, ev.Start))
    assert start.version == 2
    world.trained_batches.clear()
    world.run(lambda count: 0)
    again = dict(world.trained_batches)
    assert set(again) >= {2, 3}
    assert all(again[update] == before[update] for update in again if update in before)
    world.check_end()


def test_a_redone_version_with_other_bytes_is_loaded_again() -> None:
    world = World(standard_line(), schedule(4))
    while world.newest < 2:
        world.complete(0)
    world.kill("trainer/0")
    while not any(isinstance(c, ev.Publish) for c in world.outstanding):
        world.complete(0)
    publish = next(c for c in world.outstanding if isinstance(c, ev.Publish))
    assert publish.version == 2, "older versions have no readers and are not published again"
    world.run(lambda count: 0)
    world.check_end()


@pytest.mark.parametrize("executor", ["trainer/0", "generator/0", "reward/0"])
def test_too_many_deaths_end_the_job_with_the_reason(executor: str) -> None:
    world = World(standard_line(trainer_restarts=executor != "trainer/0"), schedule(restarts=2))
    while world.end is None:
        world.kill(executor)
    assert isinstance(world.end, ev.Abort)
    assert executor in world.end.reason
    assert "killed" in world.end.reason


def test_dropped_groups_shrink_the_batch_and_an_empty_update_still_makes_a_version() -> None:
    world = World(standard_line(capacity=100), schedule(2, 2))
    while world.end is None:
        is_first_batch = isinstance(world.outstanding[0], ev.RunGroup) and world.outstanding[0].ordinal < 2
        world.complete(0, fail="time-out" if is_first_batch else "")
    assert ledger.Trained(0, (), (0, 1)) in world.records
    assert ledger.Visible(1) in world.records
    report = audit(world.records)
    assert report.clean
    assert report.dropped == {"time-out": 2}


def test_a_second_trainable_role_joins_by_declaration_alone() -> None:
    """A critic that trains before the policy and gives its weights to a role that values every group."""
    line = Line(
        [
            Role(name="generator", unit="group", done="generated", executors=2, capacity=4),
            Role(name="reward", unit="group", done="scored", capacity=4),
            Role(name="value", unit="group", done="valued", capacity=4),
            Role(name="critic", unit="batch", done="regressed"),
            Role(name="trainer", unit="batch", done="trained"),
        ],
        [
            Channel("prompts", "groups", "task", "generator"),
            Channel("completions", "groups", "generator", "reward"),
            Channel("rollouts", "groups", "reward", "value"),
            Channel("valued", "groups", "value", "critic"),
            Channel("batches", "groups", "critic", "trainer"),
            Channel("weights", "weights", "trainer", "generator"),
            Channel("critic_weights", "weights", "critic", "value"),
        ],
    )
    world = World(line, schedule(5))
    order: list[tuple[str, int]] = []
    while world.end is None:
        command = world.outstanding[-1]
        if isinstance(command, ev.RunBatch):
            order.append((command.executor, command.update))
        world.complete(len(world.outstanding) - 1)
        if len(order) == 4:
            world.kill("critic/0")
            order.append(("died", 0))
    for update in range(5):
        assert order.index(("critic/0", update)) < order.index(("trainer/0", update))
    world.check_end()


@pytest.mark.parametrize("seed", range(30))
def test_what_a_role_leaves_for_a_batch_until_it_counts_is_made_again_after_a_death(seed: int) -> None:
    """A teacher's files are removed with each update that counts. Whoever dies, the trainer never gets a batch without."""
    rng = Random(seed)
    roles = [
        Role(name="teacher", unit="batch", done="taught", repeats=True),
        Role(name="critic", unit="batch", done="valued"),
    ]
    world = World(standard_line(capacity=100, extra=roles), schedule(8), save_every=3)
    left, seen, trained = set[int](), 0, 0
    for step in range(2000):
        if world.end is not None:
            break
        at = rng.randrange(len(world.outstanding))
        command = world.outstanding[at]
        first = next(
            one for one in world.outstanding if getattr(one, "executor", "") == getattr(command, "executor", "")
        )
        if isinstance(command, ev.RunBatch) and command is not first:
            continue  # an executor works on its batches in order
        if isinstance(command, ev.RunBatch) and command.executor == "trainer/0":
            assert command.update in left, "its files are gone"
        world.complete(at)
        if isinstance(command, ev.RunBatch) and command.executor == "teacher/0":
            left.add(command.update)
        for record in world.records[seen:]:
            if isinstance(record, ledger.Trained):
                left.discard(record.update)
                trained += 1
        seen = len(world.records)
        if step % 40 == 39 and step < 400:
            world.kill(rng.choice(["teacher/0", "critic/0", "trainer/0"]))
    assert trained > 8, "nobody had to repeat anything"
    world.check_end()


def test_a_load_that_keeps_failing_ends_the_job() -> None:
    world = World(standard_line(), schedule())
    for _ in range(200):
        if world.end is not None:
            break
        command = world.outstanding[0]
        if isinstance(command, ev.Load):
            world.outstanding.pop(0)
            world.feed(ev.LoadFailed(command.executor, command.incarnation, command.version, "checksum differs"))
        else:
            world.complete(0)
    assert isinstance(world.end, ev.Abort)
    assert "checksum differs" in world.end.reason


@pytest.mark.parametrize(
    ("roles", "channels", "message"),
    [
        (["a"], [("task", "a"), ("a", "b")], "unknown role 'b'"),
        (["a", "b"], [("task", "a"), ("task", "b")], "does not branch"),
        (["a", "b"], [("task", "a")], "no channel leads to role 'b'"),
        (["a", "b"], [("task", "a"), ("a", "b"), ("b", "a")], "returns to 'a'"),
    ],
)
def test_a_line_that_is_none_is_refused(roles: list[str], channels: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Line(
            [Role(name=name, unit="group", done="done") for name in roles],
            [Channel(f"{a}-{b}", "groups", a, b) for a, b in channels],
        )


def test_words_that_an_executor_has_no_business_to_say_change_nothing() -> None:
    world = World(standard_line(), schedule())
    while not world.trained_batches:
        world.complete(0)
    records = list(world.records)
    for event in (ev.BatchDone("generator/0", 0, 0), ev.Published("reward/0", 0, 1), ev.Saved("generator/0", 0, 0)):
        world.feed(event)
    assert world.records == records
    assert world.controller.training.trained == 0
    world.run(lambda count: 0)
    world.check_end()
