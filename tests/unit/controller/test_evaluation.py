"""Held-out problems are answered when they are due, by one version each round, beside the training."""

from __future__ import annotations

import pytest
from helpers.world import World, standard_line

from llamarl.config import EvaluateConfig, ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller.evaluation import Evaluation


def schedule(updates: int) -> ScheduleConfig:
    return ScheduleConfig(updates=updates, groups_per_update=2, samples_per_group=2, max_restarts=9)


@pytest.mark.parametrize(
    ("prompts", "every", "due"),
    [
        (0, 0, []),
        (3, 0, [0, 7]),
        (3, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, 3, [0, 3, 6, 7]),
        (3, 7, [0, 7]),
        (3, 9, [0, 7]),
    ],
)
def test_it_is_due_before_after_and_every_so_many_updates(prompts: int, every: int, due: list[int]) -> None:
    evaluation = Evaluation(EvaluateConfig(prompts=prompts, every=every), updates=7)
    assert [version for version in range(8) if evaluation.is_due(version)] == due
    world = World(standard_line(replicas=2), schedule(7), prompts=prompts, every=every)
    world.run(lambda count: 0)
    world.check_end()
    assert len(world.evaluated) == len(due)


def test_a_job_of_a_billion_updates_costs_no_more_to_plan_than_a_short_one() -> None:
    evaluation = Evaluation(EvaluateConfig(prompts=1, every=1), updates=10**9)
    assert evaluation.is_due(10**9)
    assert not evaluation.all_done


def test_every_round_asks_every_problem_once() -> None:
    world = World(standard_line(replicas=2), schedule(4), prompts=5, every=2)
    world.run(lambda count: count - 1)
    for round_ in world.evaluated:
        assert sorted((-ordinal - 1) % 5 for ordinal in round_.ordinals) == [0, 1, 2, 3, 4]
    asked = [ordinal for round_ in world.evaluated for ordinal in round_.ordinals]
    assert len(set(asked)) == len(asked)
    assert {world.kinds[ordinal] for ordinal in asked} == {"evaluation"}


def test_a_replica_keeps_its_weights_until_its_round_is_answered() -> None:
    """Training goes on with the other replica; the one that evaluates is sent to load nothing."""
    world = World(standard_line(replicas=2, capacity=4), schedule(6), prompts=3)
    while not any(isinstance(c, ev.RunGroup) and c.kind == "evaluation" for c in world.outstanding):
        world.complete(0)
    replica = next(c.executor for c in world.outstanding if isinstance(c, ev.RunGroup) and c.kind == "evaluation")
    held_back = [c for c in world.outstanding if isinstance(c, ev.RunGroup) and c.kind == "evaluation"]
    while world.newest < 2:
        index = next(i for i, c in enumerate(world.outstanding) if c not in held_back)
        world.complete(index)
        held_back = [c for c in world.outstanding if isinstance(c, ev.RunGroup) and c.kind == "evaluation"]
        assert not any(isinstance(c, ev.Load) and c.executor == replica for c in world.outstanding)
    assert world.holds[replica] == 0
    world.run(lambda count: 0)
    world.check_end()
    assert world.evaluated[0].version == 0


def test_a_round_whose_replica_died_begins_anew_under_other_ordinals() -> None:
    world = World(standard_line(), schedule(4), prompts=3)
    while not any(isinstance(c, ev.RunGroup) and c.kind == "evaluation" for c in world.outstanding):
        world.complete(0)
    before = {c.ordinal for c in world.outstanding if isinstance(c, ev.RunGroup) and c.kind == "evaluation"}
    world.kill("generator/0")
    world.run(lambda count: 0)
    world.check_end()
    assert len(world.evaluated) == 2
    assert not before & {ordinal for round_ in world.evaluated for ordinal in round_.ordinals}
    assert before <= world.forgotten
