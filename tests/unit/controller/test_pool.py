"""The pool picks the executor that a plain search over all of them would pick."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.controller.groups import GroupSpec
from llamarl.controller.line import Role
from llamarl.controller.pool import ExecutorPool, ExecutorState


def group(ordinal: int, num_completions: int) -> GroupSpec:
    return GroupSpec(ordinal, "train", num_completions)


def make_pool(executors: int, capacity: int, *, reads_weights: bool = True, at_once: int = 0) -> ExecutorPool:
    role = Role(
        name="generator", unit="group", done="generated", executors=executors, capacity=capacity, at_once=at_once
    )
    return ExecutorPool(role, 0, reads_weights)


def bring_up(pool: ExecutorPool, version: int = 0) -> None:
    for executor in pool.executors:
        executor.up, executor.version = True, version
        pool.touch(executor)


def plain_search(pool: ExecutorPool, num_completions: int, newest: int) -> ExecutorState | None:
    """Fewest groups; among equals the first. What would wait there is not given while another, ready or not, has fewer."""
    fit = [
        executor
        for executor in pool.executors
        if executor.up
        and executor.occupied + num_completions <= pool.role.capacity
        and (not executor.reads_weights or (newest >= 0 and executor.version == newest))
    ]
    chosen = min(fit, key=lambda executor: (len(executor.groups), executor.index), default=None)
    if chosen is None or chosen.occupied + num_completions <= (pool.role.at_once or pool.role.capacity):
        return chosen
    fewest = min(len(executor.groups) for executor in pool.executors if executor.up)
    return chosen if len(chosen.groups) == fewest else None


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    executors=st.integers(1, 6),
    capacity=st.integers(1, 9),
    at_once=st.integers(0, 9),
    weights=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    reads_weights=st.booleans(),
)
def test_it_chooses_whom_a_plain_search_would_choose(
    seed: int, executors: int, capacity: int, at_once: int, weights: list[int], reads_weights: bool
) -> None:
    pool = make_pool(executors, capacity, reads_weights=reads_weights, at_once=min(at_once, capacity))
    random, newest = Random(seed), -1
    for ordinal in range(200):
        executor = random.choice(pool.executors)
        action = random.random()
        if action < 0.5:
            num_completions = random.choice(weights)
            chosen = pool.least_busy(num_completions, newest)
            assert chosen is plain_search(pool, num_completions, newest)
            if chosen is not None and random.random() < 0.9:
                chosen.assign(group(ordinal, num_completions))
                pool.touch(chosen)
        elif action < 0.8 and executor.groups:
            executor.release(random.choice(list(executor.groups.values())))
            pool.touch(executor)
        elif action < 0.9:
            executor.up, executor.version = True, newest
            pool.touch(executor)
        elif action < 0.95:
            executor.reset()
        else:
            newest += 1  # all become stale until they have loaded


def test_a_group_goes_to_the_executor_with_the_fewest_groups() -> None:
    pool = make_pool(3, 100)
    bring_up(pool)
    for ordinal, index in enumerate([0, 0, 1]):
        pool.executors[index].assign(group(ordinal, 1))
        pool.touch(pool.executors[index])
    assert pool.least_busy(1, 0) is pool.executors[2]


def test_groups_are_counted_not_completions() -> None:
    pool = make_pool(2, 100)
    bring_up(pool)
    pool.executors[0].assign(group(0, 50))
    for ordinal in (1, 2):
        pool.executors[1].assign(group(ordinal, 1))
    for executor in pool.executors:
        pool.touch(executor)
    assert pool.least_busy(1, 0) is pool.executors[0]


def test_nobody_is_given_more_than_its_capacity() -> None:
    pool = make_pool(2, 5)
    bring_up(pool)
    given = 0
    while (chosen := pool.least_busy(2, 0)) is not None:
        chosen.assign(group(given, 2))
        pool.touch(chosen)
        given += 1
    assert given == 4
    assert [executor.occupied for executor in pool.executors] == [4, 4]


def test_what_would_only_wait_is_not_given_while_another_has_fewer() -> None:
    pool = make_pool(2, 6, at_once=2)
    bring_up(pool)
    pool.executors[1].version = -1  # it takes new weights just now
    for ordinal in (0, 1):
        chosen = pool.least_busy(1, 0)
        assert chosen is pool.executors[0]
        chosen.assign(group(ordinal, 1))
        pool.touch(chosen)
    assert pool.least_busy(1, 0) is None, "the other one is about to ask for it"
    pool.executors[1].version = 0
    pool.touch(pool.executors[1])
    given = []
    for ordinal in range(2, 12):
        if (chosen := pool.least_busy(1, 0)) is not None:
            chosen.assign(group(ordinal, 1))
            pool.touch(chosen)
            given.append(chosen.index)
    assert given == [1, 1, 0, 1, 0, 1, 0, 1, 0, 1]


def test_a_group_that_does_not_fit_does_not_hide_room_for_a_smaller_one() -> None:
    pool = make_pool(1, 5)
    bring_up(pool)
    pool.executors[0].assign(group(0, 3))
    pool.touch(pool.executors[0])
    assert pool.least_busy(4, 0) is None
    assert pool.least_busy(1, 0) is pool.executors[0]


def test_the_stale_and_the_dead_are_passed_over() -> None:
    pool = make_pool(3, 5)
    bring_up(pool, version=3)
    pool.executors[0].version = 2
    pool.executors[1].reset()
    assert pool.least_busy(1, 3) is pool.executors[2]
    assert pool.least_busy(1, 4) is None


def test_before_the_first_version_nobody_that_reads_weights_is_given_anything() -> None:
    pool = make_pool(2, 5)
    bring_up(pool, version=-1)
    assert pool.least_busy(1, -1) is None
    without = make_pool(2, 5, reads_weights=False)
    bring_up(without, version=-1)
    assert without.least_busy(1, -1) is without.executors[0]


def test_memory_stays_bounded_over_a_long_life() -> None:
    pool = make_pool(4, 8)
    bring_up(pool)
    for ordinal in range(5_000):
        pool.executors[ordinal % 4].assign(group(ordinal, 1))
        pool.touch(pool.executors[ordinal % 4])
        pool.executors[ordinal % 4].release(group(ordinal, 1))
        pool.touch(pool.executors[ordinal % 4])
    assert len(pool._up) + sum(map(len, pool._heaps.values())) < 500


def test_death_returns_the_groups_in_order_and_leaves_nothing() -> None:
    executor = make_pool(1, 50).executors[0]
    executor.up, executor.version = True, 3
    for ordinal in (9, -3, 5):
        executor.assign(group(ordinal, 2))
    assert [one.ordinal for one in executor.reset()] == [-3, 5, 9]
    assert (executor.groups, executor.occupied, executor.version) == ({}, 0, -1)
    assert not executor.up
