"""Dynamic sampling: groups without variance are replaced within the budget; bound, ledger and resume hold as before."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.controller import Controller
from llamarl.controller.ledger_state import LedgerState, audit
from llamarl.controller.recovery import resumption
from llamarl.controller.replacements import Replacements, replacement_metrics
from llamarl.errors import ConfigError

EXECUTORS = ["generator/0", "generator/1", "reward/0", "trainer/0"]
stalenesses, group_counts, windows, budgets = st.integers(0, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9)
shares, seeds = st.floats(0.0, 1.0), st.integers(0, 2**32)


def rules(staleness: int, groups: int, window: int, budget: int, *, deterministic: bool = False) -> ScheduleConfig:
    return ScheduleConfig(
        updates=6,
        groups_per_update=groups,
        samples_per_group=2,
        max_staleness=staleness,
        window=1 if deterministic else min(window, (staleness + 1) * groups),
        deterministic=deterministic,
        dynamic_sampling=budget,
        probe_every=0,
        max_restarts=99,
        max_attempts=99,
    )


def flat_by(seed: int, share: float):  # type: ignore[no-untyped-def]
    return lambda ordinal: Random(seed * 1_000_003 + ordinal).random() < share


def play(world: World, random: Random, kills: int = 0, steps: int = 10_000) -> None:
    """Complete work in any order, with deaths in between; the world checks bound, order and batches at every command."""
    for _ in range(steps):
        if world.end is not None:
            return
        assert world.outstanding, "deadlock"
        if kills and random.random() < 0.05:
            kills -= 1
            world.kill(random.choice(EXECUTORS))
        else:
            world.complete(random.randrange(len(world.outstanding)))


@settings(max_examples=200, deadline=None)
@given(seeds, stalenesses, group_counts, windows, budgets, shares)
def test_any_order_of_events_ends_clean_within_bound_and_budget(
    seed: int, staleness: int, groups: int, window: int, budget: int, share: float
) -> None:
    schedule = rules(staleness, groups, window, budget)
    world = World(standard_line(replicas=2), schedule, prompts=2, every=2, save_every=2, flat=flat_by(seed, share))
    play(world, Random(seed), kills=4)
    world.check_end()


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(0, 1), group_counts, budgets, shares)
def test_in_deterministic_mode_timing_changes_neither_batches_nor_versions(
    seed: int, staleness: int, groups: int, budget: int, share: float
) -> None:
    schedule, flat = rules(staleness, groups, 1, budget, deterministic=True), flat_by(seed, share)
    found = []
    for order in range(3):
        world = World(standard_line(replicas=2), schedule, prompts=2, every=2, save_every=order, flat=flat)
        play(world, Random(order), kills=3)
        world.check_end()
        batches = dict(world.trained_batches)
        found.append((batches, world.replaced, {o: world.first_version[o] for b in batches.values() for o in b}))
    assert found[0] == found[1] == found[2]


@given(seeds, group_counts, budgets, shares)
@settings(max_examples=100, deadline=None)
def test_in_order_the_rewards_alone_decide(seed: int, groups: int, budget: int, share: float) -> None:
    """Against the rule said plainly: go through the ordinals; a flat group is left out while the batch's budget lasts."""
    schedule, flat = rules(1, groups, 1, budget), flat_by(seed, share)
    world = World(standard_line(replicas=2), schedule, flat=flat)
    play(world, Random(seed), kills=2)
    expected: list[tuple[int, ...]] = []
    ordinal = 0
    while len(expected) < schedule.updates:
        batch: list[int] = []
        left = budget
        while len(batch) < groups:
            if flat(ordinal) and left:
                left -= 1
            else:
                batch.append(ordinal)
            ordinal += 1
        expected.append(tuple(batch))
    assert [dict(world.trained_batches)[update] for update in range(schedule.updates)] == expected


@settings(max_examples=200, deadline=None)
@given(seeds, stalenesses, group_counts, windows, budgets, shares, st.integers(0, 200), st.integers(0, 3))
def test_a_killed_job_keeps_what_was_replaced_and_ends_clean(
    seed: int, staleness: int, groups: int, window: int, budget: int, share: float, steps: int, losses: int
) -> None:
    random, schedule, flat = Random(seed), rules(staleness, groups, window, budget), flat_by(seed, share)
    first = World(standard_line(replicas=2), schedule, save_every=2, flat=flat)
    play(first, random, steps=steps)
    scored = {r.ordinal for r in first.records if isinstance(r, ledger.Passed) and r.state == "scored"}
    store = scored - first.forgotten
    for _ in range(losses):  # the end of the store may not have reached the disk
        store.discard(max(store, default=-1))
    state = LedgerState.of(first.records)
    if first.controller.snapshots.saved:
        state.fold(first.controller.snapshots.saved)  # folding changes no answer
        assert LedgerState.of([state.checkpoint()]).audit() == audit(first.records)
    version = first.controller.snapshots.saved
    resumed = resumption(state, store, version, (), same_rewards={o for o in store if flat(o)})
    second = World(standard_line(), schedule, save_every=2, begin=resumed, flat=flat, records=first.records)
    second.first_version = {**first.first_version}
    play(second, random)
    if isinstance(first.end, ev.Finish):
        return
    second.check_end()
    assert first.replaced.items() <= second.replaced.items(), "what was replaced stays so"
    assert second.replaced.keys().isdisjoint(o for _, batch in second.trained_batches for o in batch)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(0, 1), group_counts, budgets, shares, st.integers(0, 200))
def test_a_killed_deterministic_job_makes_the_same_batches(
    seed: int, staleness: int, groups: int, budget: int, share: float, steps: int
) -> None:
    schedule, flat = rules(staleness, groups, 1, budget, deterministic=True), flat_by(seed, share)
    straight = World(standard_line(), schedule, save_every=2, flat=flat)
    play(straight, Random(seed))
    first = World(standard_line(replicas=2), schedule, save_every=2, flat=flat)
    play(first, Random(seed + 1), steps=steps)
    if first.end is not None:
        return
    scored = {r.ordinal for r in first.records if isinstance(r, ledger.Passed) and r.state == "scored"}
    store, version = scored - first.forgotten, first.controller.snapshots.saved
    flats = {o for o in store if flat(o)}
    resumed = resumption(LedgerState.of(first.records), store, version, (), same_rewards=flats)
    second = World(standard_line(), schedule, save_every=2, begin=resumed, flat=flat, records=first.records)
    second.first_version = {**first.first_version}
    play(second, Random(seed + 2))
    second.check_end()
    assert {**dict(first.trained_batches), **dict(second.trained_batches)} == dict(straight.trained_batches)
    assert second.replaced == straight.replaced


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_job_that_is_told_to_stop_ends_with_a_snapshot(staleness: int, deterministic: bool) -> None:
    for steps in range(5, 120, 7):
        schedule = rules(staleness, 3, 1, 4, deterministic=deterministic)
        world = World(standard_line(), schedule, save_every=2, flat=flat_by(steps, 0.5))
        play(world, Random(steps), steps=steps)
        if world.end is None:
            world.feed(ev.StopRequested())
            play(world, Random(steps))
            assert isinstance(world.end, ev.Finish)


def test_a_batch_without_any_variance_is_trained_once_the_budget_is_used_up() -> None:
    world = World(standard_line(), rules(1, 2, 1, 3), flat=lambda ordinal: True)
    play(world, Random(0))
    world.check_end()
    assert Counter(world.replaced.values()) == dict.fromkeys(range(6), 3)
    assert audit(world.records).dropped == {ledger.NO_VARIANCE: 18}


def test_deterministic_mode_with_more_staleness_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="max_staleness=2 is too much"):
        rules(2, 2, 1, 1, deterministic=True)


# Planted faults: the checks above would notice.


def broken(schedule: ScheduleConfig) -> bool:
    for seed in range(40):
        world = World(standard_line(replicas=2), schedule, save_every=2, flat=flat_by(seed, 0.5))
        try:
            play(world, Random(seed), kills=2)
            world.check_end()
        except AssertionError:
            return True
    return False


def test_a_place_freed_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_one = Controller._replace

    def twice(self: Controller, ordinal: int, update: int) -> bool:
        found = replace_one(self, ordinal, update)
        self.places_used -= found
        return found

    monkeypatch.setattr(Controller, "_replace", twice)
    assert broken(rules(1, 3, 1, 4))


def test_a_replacement_beyond_the_budget_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Replacements.__init__

    def generous(self: Replacements, schedule: ScheduleConfig) -> None:
        init(self, replace(schedule, dynamic_sampling=schedule.dynamic_sampling + 1))

    monkeypatch.setattr(Replacements, "__init__", generous)
    assert broken(rules(1, 3, 1, 2))


def test_a_group_that_is_replaced_and_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Controller._write
    monkeypatch.setattr(
        Controller, "_write", lambda self, record: None if isinstance(record, ledger.Replaced) else write(self, record)
    )
    assert broken(rules(1, 3, 1, 2))


def test_a_version_that_forgets_replaced_groups_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replacements, "sampling_version", lambda self, o: self._schedule.sampling_version(o))
    assert broken(rules(1, 3, 1, 2, deterministic=True))


def test_a_group_both_replaced_and_trained_is_counted_twice() -> None:
    records: list[ledger.Record] = [ledger.Opened(1, 1), ledger.Issued(0, "generator/0", 0), ledger.Replaced(0, 0)]
    assert audit([*records, ledger.Trained(0, (0,))]).counted_twice == (0,)
    assert audit(records).num_unfinished == 1, "the group that takes its place is still missing"


def test_rows_of_data_do_not_count_as_groups_that_could_have_variance() -> None:
    found = replacement_metrics(
        Replacements(rules(1, 4, 2, 3)), 0, {"groups": 8.0, "sft_rows": 6.0, "zero_variance_share": 0.5}
    )
    assert found["no_variance_share"] == 0.5
