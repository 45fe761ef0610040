"""Kept rollouts: the trained ones exactly, whole groups, a bounded size, and readable while they are written or torn."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.groups import completion, prompt_group, rollout_group

from llamarl.errors import InputError
from llamarl.observe.rollout_log import ALL, RolloutIndex, RolloutLog, SavedGroup
from llamarl.types import RolloutGroup


def group(ordinal: int, tokens: int = 4) -> RolloutGroup:
    answers = [(completion([1] * tokens), 1.0), (completion([2] * tokens), 0.5)]
    return rollout_group([1, 2, 3], answers, ordinal=ordinal)


def add(log: RolloutLog, update: int, ordinals: range) -> None:
    groups = {ordinal: group(ordinal) for ordinal in ordinals}
    log.add(update, len(groups), [SavedGroup(update, groups[ordinal]) for ordinal in log.choose(groups)])


def contents(folder: Path) -> dict[int, list[int]]:
    index = RolloutIndex(folder)
    found = {}
    for update in index.updates:
        row = index.get(update)
        assert row is not None
        saved = [index.read(place) for place in row.groups]
        assert [one.group for one in saved] == [group(place.ordinal) for place in row.groups]
        assert all(one.update == update for one in saved)
        assert [place.rewards for place in row.groups] == [(1.0, 0.5)] * len(saved)
        found[update] = [one.group.ordinal for one in saved]
    return found


def test_what_was_added_is_read_back_by_update(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, ALL, updates=3)
    add(log, 0, range(0, 4))
    add(log, 1, range(4, 8))
    assert contents(tmp_path) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}, "before the log is closed"
    log.close()


def test_a_reader_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    index = RolloutIndex(tmp_path)
    assert index.updates == []
    log = RolloutLog(tmp_path, ALL, updates=3)
    for update in range(3):
        add(log, update, range(update, update + 1))
        index.refresh()
        assert index.updates == [*range(update + 1)]
    log.close()


def test_updates_that_are_made_again_count_once(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, ALL, updates=4)
    for update in range(3):
        add(log, update, range(update, update + 1))
    index = RolloutIndex(tmp_path)
    log.rewind(1)
    index.refresh()
    assert index.updates == [0], "what was taken back is gone before it is made again"
    add(log, 1, range(7, 8))
    log.close()
    assert contents(tmp_path) == {0: [0], 1: [7]}
    again = RolloutLog(tmp_path, ALL, updates=4, next_update=1)  # the job was killed and goes on from a snapshot
    again.close()
    assert contents(tmp_path) == {0: [0]}


def test_a_torn_end_hides_only_the_update_that_was_being_written(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, ALL, updates=2)
    add(log, 0, range(0, 2))
    whole = [(tmp_path / name / "00000000").stat().st_size for name in ("groups", "index")]
    add(log, 1, range(2, 4))
    log.close()
    full = (tmp_path / "index" / "00000000").read_bytes()
    for length in range(whole[1], len(full)):
        (tmp_path / "index" / "00000000").write_bytes(full[:length])
        assert contents(tmp_path) == {0: [0, 1]}
    again = RolloutLog(tmp_path, ALL, updates=2, next_update=1)
    add(again, 1, range(2, 4))
    again.close()
    assert contents(tmp_path) == {0: [0, 1], 1: [2, 3]}


def test_damage_is_told_and_nothing_else_is_lost(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, ALL, updates=2)
    add(log, 0, range(0, 2))
    add(log, 1, range(2, 4))
    log.close()
    file = tmp_path / "groups" / "00000000"
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    index = RolloutIndex(tmp_path)
    first, second = (row.groups for row in map(index.get, (0, 1)) if row is not None)
    with pytest.raises(InputError, match="no whole record at byte 0"):
        index.read(first[0])
    assert index.read(second[1]).group.ordinal == 3


def test_the_limit_is_shared_by_the_updates_and_leaves_each_at_least_one_whole_group(tmp_path: Path) -> None:
    tokens = 10_000  # times two answers and 12 bytes: 240 kB
    groups = {ordinal: group(ordinal, tokens) for ordinal in range(16)}
    log = RolloutLog(tmp_path / "one", 1, updates=1)
    assert len(log.choose(groups)) == 4
    assert log.choose(groups) == log.choose(dict(reversed(groups.items()))), "the order of a batch does not matter"
    assert log.choose(groups) != (0, 1, 2, 3), "a batch may be sorted by something"
    assert len(RolloutLog(tmp_path / "many", 1, updates=10**9).choose(groups)) == 1
    assert len(RolloutLog(tmp_path / "all", ALL, updates=10**9).choose(groups)) == 16


def test_zero_keeps_nothing_and_writes_nothing(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts", 0, updates=1)
    add(log, 0, range(4))
    log.sync()
    log.close()
    assert not (tmp_path / "rollouts").exists()


def test_a_run_that_keeps_nothing_any_more_still_takes_back_what_it_makes_again(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, ALL, updates=2)
    add(log, 0, range(0, 2))
    add(log, 1, range(2, 4))
    log.close()
    log = RolloutLog(tmp_path, 0, updates=2, next_update=1)
    add(log, 1, range(2, 4))
    log.close()
    assert contents(tmp_path) == {0: [0, 1]}


def test_dropped_groups_are_kept_with_their_reason(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, ALL, updates=1)
    log.add(0, 1, [SavedGroup(0, prompt_group([1, 2], ordinal=5), dropped="too long")])
    log.close()
    index = RolloutIndex(tmp_path)
    row = index.get(0)
    assert row is not None
    (place,) = row.groups
    assert (place.ordinal, place.rewards, place.dropped) == (5, (), "too long")
    assert index.read(place).dropped == "too long"
