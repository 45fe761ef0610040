"""Decoding in virtual time is the sum of its decode steps, however time is cut into pieces."""

from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest

from llamarl.model_spec import shape_named
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import GPUS
from llamarl.simulate.decoding import Decoding

REPLICA = Replica(shape_named("llama-3.2-1b"), GPUS["h100"], "bf16", 1, 64, 100, 1100)


def started(groups: dict[int, list[int]], slots: int = 64) -> Decoding:
    decoding = Decoding(msgspec.structs.replace(REPLICA, slots=slots))
    for ordinal, lengths in groups.items():
        decoding.start(ordinal, lengths)
    return decoding


def by_steps(lengths: list[int]) -> float:
    """One step after the other until the last has ended, each with what is under way then."""
    late, spent_s, step = REPLICA.late_steps, 0.0, 0
    while active := sum(length + late > step for length in lengths):
        spent_s += REPLICA.step_s(active, active * (REPLICA.prompt + step + 0.5))
        step += 1
    return spent_s


@pytest.mark.parametrize("seed", range(5))
def test_as_long_as_all_its_steps(seed: int) -> None:
    chance = Random(seed)
    lengths = [chance.randint(1, 600) for _ in range(chance.randint(1, 30))]
    assert started({0: lengths}).due_s() == pytest.approx(by_steps(lengths), rel=1e-3)


@pytest.mark.parametrize("slots", [64, 24, 5])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_time_add_up(seed: int, slots: int) -> None:
    chance = Random(seed)
    groups = {ordinal: [chance.randint(1, 400) for _ in range(4)] for ordinal in range(6)}
    whole, pieces = started(groups, slots), started(groups, slots)
    done_at: dict[int, float] = {}
    now_s = 0.0
    while (due_s := whole.due_s()) < inf:
        now_s += due_s
        done_at |= dict.fromkeys(whole.advance(due_s), now_s)
    assert sorted(done_at) == sorted(groups)
    at_s, found = 0.0, dict[int, float]()
    while len(found) < len(groups):
        step_s = min(pieces.due_s(), chance.uniform(0.001, 0.3))
        at_s += step_s
        found |= dict.fromkeys(pieces.advance(step_s), at_s)
    assert found == pytest.approx(done_at, rel=1e-6)


class Steady:
    """Every step takes a second."""

    prompt, slots, late_steps = 0, 3, 0.0

    def __init__(self) -> None:
        self.most = 0.0

    def step_s(self, active: float, cached_tokens: float) -> float:
        self.most = max(self.most, active)
        return 1.0

    def growth_s(self, active: int, cached_tokens: float) -> float:
        return 0.0

    def prefill_s(self, groups: int) -> float:
        return 0.0


def test_an_answer_that_finds_no_slot_starts_where_another_ends() -> None:
    pace = Steady()
    decoding = Decoding(pace)
    for ordinal, lengths in enumerate([[5, 3], [4, 2], [6]]):  # the 2 from step 3 on, the 6 from step 4 on
        decoding.start(ordinal, lengths)
    assert decoding.due_s() == 5 and decoding.advance(5) == [0, 1]
    decoding.start(3, [1, 1, 1])  # two slots are free
    assert decoding.due_s() == 2 and decoding.advance(2) == [3]
    assert decoding.due_s() == 3 and decoding.advance(3) == [2]
    assert decoding.due_s() == inf and pace.most == 3


def test_nothing_is_due_where_nothing_is_under_way() -> None:
    decoding = Decoding(REPLICA)
    assert decoding.due_s() == inf
    decoding.start(0, [5])
    decoding.clear()
    assert decoding.due_s() == inf
