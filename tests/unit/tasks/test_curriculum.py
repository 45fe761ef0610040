"""A curriculum by success rate: solved problems rarer, hard ones later, and nothing but earlier outcomes decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from helpers.world import World, standard_line
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamarl.config import ScheduleConfig, TaskConfig
from llamarl.controller.events import RunGroup
from llamarl.controller.ledger import Dropped, Passed
from llamarl.engine.curriculum_log import CurriculumLog, read_curriculum
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.curriculum import Choice, Curriculum, CurriculumRule, Outcome, audit_curriculum, curriculum_rule
from llamarl.tasks.mixture import Mixture
from llamarl.tasks.task import Task
from llamarl.types import GroupFacts, Problem

RULE = CurriculumRule((10,), (1.0,), 0, 5, 1.0, 0.0)


def facts(reward: float | None) -> GroupFacts | None:
    return None if reward is None else GroupFacts(reward=reward)


def asked(rule: CurriculumRule, count: int, reward: Callable[[Choice], float | None]) -> list[Choice]:
    """The problems of the first ordinals, where each outcome is heard at once."""
    curriculum, found = Curriculum(rule), []
    for ordinal in range(count):
        found.append(curriculum.choice(ordinal))
        curriculum.hear(ordinal, reward(found[-1]))
    assert not curriculum.missing
    return found


def test_the_first_pass_asks_every_problem_once_and_problems_with_variance_come_every_pass() -> None:
    found = asked(RULE, 100, lambda choice: 0.5)
    for first in range(0, 100, 10):
        assert sorted(choice.number for choice in found[first : first + 10]) == list(range(10))


def test_solved_problems_come_rarer_and_hard_ones_later_than_the_others() -> None:
    """Problems 0 to 4 are always solved, 5 to 9 never, and 10 to 19 sometimes."""
    rule = replace(RULE, sizes=(20,), stage=4)
    rewards = {**dict.fromkeys(range(5), 1.0), **dict.fromkeys(range(5, 10), 0.0)}
    counts = Counter(choice.number for choice in asked(rule, 1000, lambda choice: rewards.get(choice.number, 0.5)))
    solved, hard, others = ([counts[n] for n in numbers] for numbers in (range(5), range(5, 10), range(10, 20)))
    assert max(solved) < min(hard) < max(hard) < min(others)
    assert min(solved) >= 2, "nothing is given up for good"


def test_a_problem_that_was_hard_and_is_not_any_more_comes_every_pass_again() -> None:
    turns: Counter[int] = Counter()

    def learned(choice: Choice) -> float:
        turns[choice.number] += 1
        return 0.0 if choice.number < 5 and turns[choice.number] <= 2 else 0.5

    late = asked(RULE, 400, learned)[300:]
    assert {choice.number for choice in late} == set(range(10))


def test_no_problem_is_asked_twice_in_a_stage_while_there_are_others() -> None:
    rewards = {3: 0.5}
    found = asked(replace(RULE, stage=6), 300, lambda choice: rewards.get(choice.number, 1.0))
    for first in range(0, 300, 6):
        assert len({choice.number for choice in found[first : first + 6]}) == 6


def test_fewer_problems_than_a_stage_are_asked_again_within_it() -> None:
    found = asked(replace(RULE, sizes=(3,), stage=7), 70, lambda choice: 0.5)
    assert set(Counter(choice.number for choice in found[:7]).values()) <= {2, 3}


def test_a_mixture_keeps_its_shares_and_each_part_its_own_passes() -> None:
    rule = replace(RULE, sizes=(10, 40), weights=(1.0, 3.0), stage=50)
    found = asked(rule, 2000, lambda choice: 1.0 if choice.part == 0 else 0.5)
    parts = Counter(choice.part for choice in found)
    assert parts == {0: 500, 1: 1500}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 12))
def test_the_order_in_which_outcomes_of_a_stage_come_decides_nothing(seed: int, size: int, stage: int) -> None:
    rule, random = replace(RULE, sizes=(size,), stage=stage), Random(seed)
    rewards = [random.choice([0.0, 0.5, 1.0, None]) for _ in range(20 * stage)]
    straight = Curriculum(rule)
    late = Curriculum(rule)
    first, second = [], []
    for number in range(20):
        ordinals = list(range(number * stage, (number + 1) * stage))
        for ordinal in ordinals:
            first.append(straight.choice(ordinal))
            straight.hear(ordinal, rewards[ordinal])
        second += [late.choice(ordinal) for ordinal in ordinals]
        before = list(range(max(0, number - 1) * stage, number * stage))  # heard when the next stage has begun
        for ordinal in random.sample(before, len(before)):
            late.hear(ordinal, rewards[ordinal])
    assert first == second
    assert not straight.missing and not late.missing


def test_the_first_outcome_counts_and_a_second_changes_nothing() -> None:
    curriculum = Curriculum(RULE)
    assert curriculum.hear(0, 1.0)
    assert not curriculum.hear(0, 0.0)


# The stage is long enough


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.booleans())
def test_outcomes_a_stage_ago_are_known_whenever_a_group_is_admitted(
    seed: int, staleness: int, groups: int, window: int, budget: int, deterministic: bool
) -> None:
    exact = deterministic and (staleness < 2 or not budget)
    schedule = ScheduleConfig(
        updates=8,
        groups_per_update=groups,
        samples_per_group=2,
        max_staleness=staleness,
        window=1 if exact else min(window, (staleness + 1) * groups),
        dynamic_sampling=budget,
        deterministic=exact,
        probe_every=0,
        max_restarts=99,
        max_attempts=99,
    )
    stage = curriculum_rule(TaskConfig(), schedule, 0, task_of(50)).stage
    random = Random(seed)
    flats = [random.random() < 0.5 for _ in range(1000)]
    world = World(standard_line(replicas=2), schedule, save_every=2, flat=lambda ordinal: flats[ordinal])
    seen, checked = set[int](), 0
    while world.end is None:
        world.complete(random.randrange(len(world.outstanding)))
        for command in world.commands[checked:]:
            if (
                isinstance(command, RunGroup)
                and command.executor.startswith("generator")
                and command.ordinal not in seen
            ):
                seen.add(command.ordinal)
                known = {r.ordinal for r in world.records if isinstance(r, Passed) and r.state == "scored"}
                known |= {r.ordinal for r in world.records if isinstance(r, Dropped)}
                assert known.issuperset(range(command.ordinal - stage + 1)), "an outcome was not known in time"
        checked = len(world.commands)


def task_of(count: int) -> Task:
    return Task([Problem(f"{n}", "1") for n in range(count)], [Problem("held out", "1")], seed=0)


def test_a_task_without_numbers_or_with_too_many_is_refused_in_one_line() -> None:
    class Endless:
        def problem(self, ordinal: int) -> Problem:
            return Problem("1", "1")

    with pytest.raises(ConfigError, match=r"task given from Python"):
        curriculum_rule(TaskConfig(), ScheduleConfig(), 0, Endless())
    huge = Task(range(10**9), [], seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="too many"):
        curriculum_rule(TaskConfig(), ScheduleConfig(), 0, huge)
    with pytest.raises(ConfigError, match=r"solved_from: must be above task.hard_up_to"):
        TaskConfig(hard_up_to=1.0)


def test_a_mixture_has_the_sizes_of_its_parts() -> None:
    mixture = Mixture([(task_of(3), 1.0), (task_of(5), 2.0)], seed=0)
    assert (mixture.sizes, mixture.weights) == ((3, 5), (1.0, 2.0))
    assert mixture.numbered(1, 4).prompt == "4"


# The record


def reward_of(ordinal: int) -> float | None:
    return Random(ordinal).choice([0.0, 0.5, 1.0, None])


def test_a_resumed_log_chooses_the_same_and_its_audit_is_clean(tmp_path: Path) -> None:
    straight = CurriculumLog(tmp_path / "straight", RULE)
    expected = []
    for ordinal in range(60):
        expected.append(straight.choice(ordinal))
        straight.hear(ordinal, facts(reward_of(ordinal)))
    straight.close()
    found = []
    for start in range(0, 60, 7):  # every seven groups the job is killed
        log = CurriculumLog(tmp_path / "killed", RULE)
        for ordinal in range(start, min(60, start + 7)):
            found.append(log.choice(ordinal))
            log.hear(ordinal, facts(reward_of(ordinal)))
            log.hear(ordinal, facts(0.5))  # told again after a resume
        log.close()
    assert found == expected
    for name in ("straight", "killed"):
        rule, outcomes = read_curriculum(tmp_path / name)
        assert rule == RULE
        assert audit_curriculum(RULE, outcomes) == audit_curriculum(RULE, outcomes[::-1])
        assert audit_curriculum(RULE, outcomes).differences == ()
        assert len(outcomes) == 60


def test_an_outcome_that_a_kill_lost_counts_as_none_for_good(tmp_path: Path) -> None:
    log = CurriculumLog(tmp_path, RULE)
    for ordinal in range(10):
        if ordinal != 3:
            log.hear(ordinal, facts(1.0))
    expected = [log.choice(ordinal) for ordinal in range(15)]
    log.hear(3, facts(1.0))  # too late: stage 2 has begun
    log.close()
    again = CurriculumLog(tmp_path, RULE)
    assert [again.choice(ordinal) for ordinal in range(15)] == expected
    _, outcomes = read_curriculum(tmp_path)
    assert [one.reward for one in outcomes if one.ordinal == 3] == [None]
    assert not audit_curriculum(RULE, outcomes).differences


def test_an_altered_choice_or_outcome_is_noticed_by_the_audit() -> None:
    curriculum, outcomes = Curriculum(RULE), []
    for ordinal in range(40):
        chosen = curriculum.choice(ordinal)
        curriculum.hear(ordinal, 1.0)
        outcomes.append(Outcome(ordinal, chosen.part, chosen.number, 1.0))
    assert not audit_curriculum(RULE, outcomes).differences
    wrong = [replace(one, number=(one.number + 1) % 10) if one.ordinal == 7 else one for one in outcomes]
    assert audit_curriculum(RULE, wrong).differences == (7,)
    assert audit_curriculum(RULE, [*outcomes, outcomes[5]]).told_twice == (5,)
    altered = [replace(one, reward=0.5) if one.ordinal < 10 else one for one in outcomes]
    assert audit_curriculum(RULE, altered).differences, "other outcomes would have led to other problems"


def test_other_data_than_the_run_began_with_are_refused(tmp_path: Path) -> None:
    CurriculumLog(tmp_path, RULE).close()
    with pytest.raises(InputError, match="other ones than when"):
        CurriculumLog(tmp_path, replace(RULE, sizes=(11,)))
