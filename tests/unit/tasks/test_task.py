"""Problems come in a seeded order that can be entered anywhere; what is held out is never trained on, in any job."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import TaskConfig
from llamarl.errors import InputError
from llamarl.tasks.registry import make_single_task, make_task
from llamarl.tasks.scorers import exact, numeric
from llamarl.tasks.task import Lazily, Task, is_held_out
from llamarl.types import Problem

PROBLEMS = [Problem(str(number), str(number)) for number in range(13)]


def operands(problem: Problem) -> tuple[int, int]:
    left, right = problem.prompt.removesuffix("=").split("+")
    return int(left), int(right)


@given(st.integers(0, 2**62), st.integers(0, 2**32))
def test_random_access_equals_sequential(seed: int, order: int) -> None:
    """A job that was interrupted, or a replica that comes late, enters anywhere."""
    task = Task(PROBLEMS, [], seed=seed)
    sequential = [task.problem(ordinal) for ordinal in range(40)]
    ordinals = list(range(40))
    Random(order).shuffle(ordinals)
    other = Task(PROBLEMS, [], seed=seed)
    assert {ordinal: other.problem(ordinal) for ordinal in ordinals} == dict(enumerate(sequential))


@given(st.integers(0, 2**62))
def test_every_pass_is_a_permutation_of_its_own(seed: int) -> None:
    task, count = Task(PROBLEMS, [], seed=seed), len(PROBLEMS)
    passes = [[task.problem(number * count + index) for index in range(count)] for number in range(3)]
    for one in passes:
        assert sorted(problem.prompt for problem in one) == sorted(problem.prompt for problem in PROBLEMS)
    assert passes[0] != passes[1]
    assert passes[1] != passes[2]


def test_another_seed_gives_another_order() -> None:
    first, second = (
        [task.problem(ordinal) for ordinal in range(13)] for task in (Task(PROBLEMS, [], seed=s) for s in (0, 1))
    )
    assert first != second


def test_the_order_is_the_same_in_every_version_of_the_program() -> None:
    """A run can be continued, and results compared, only if these never change."""
    task = make_single_task(TaskConfig(), seed=0)
    assert [task.problem(ordinal).prompt for ordinal in (0, 1, 10_000)] == ["31+33=", "7+38=", "14+95="]
    assert [problem.prompt for problem in task.evaluation(3)] == ["7+70=", "34+7=", "74+10="]


def test_held_out_pairs_are_never_trained_on_not_even_the_other_way_round() -> None:
    task = make_single_task(TaskConfig(), seed=0)
    held_out = {frozenset(operands(problem)) for problem in task.held_out}
    trained = {frozenset(operands(problem)) for problem in task.train}
    assert held_out and trained
    assert not held_out & trained


def test_every_pair_is_there_once() -> None:
    task = make_single_task(TaskConfig(max_operand=30), seed=0)
    found = sorted(operands(problem) for problem in [*task.train, *task.held_out])
    assert found == [(a, b) for a in range(31) for b in range(31)]


def test_every_answer_is_the_sum_and_every_scorer_accepts_it() -> None:
    task = make_single_task(TaskConfig(max_operand=20), seed=0)
    for problem in [*task.train, *task.held_out]:
        assert int(problem.answer) == sum(operands(problem))
        assert all(score(problem.answer, problem.answer, problem.prompt) == 1.0 for score in (exact, numeric))


def test_what_is_held_out_depends_on_the_problem_alone() -> None:
    """Neither the seed nor the range of the operands moves a problem to the other side."""
    small, large = make_single_task(TaskConfig(max_operand=20), 0), make_single_task(TaskConfig(max_operand=40), 99)
    inside = {problem.prompt for problem in large.held_out if max(operands(problem)) <= 20}
    assert {problem.prompt for problem in small.held_out} == inside
    assert list(small.evaluation(5)) == list(make_single_task(TaskConfig(max_operand=20), 7).evaluation(5))


def test_holding_out_more_keeps_what_was_held_out() -> None:
    few, many = (make_single_task(TaskConfig(held_out=share), 0) for share in (0.05, 0.3))
    assert {problem.prompt for problem in few.held_out} < {problem.prompt for problem in many.held_out}


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_the_share_that_is_held_out_is_the_one_asked_for(share: float) -> None:
    held_out = sum(is_held_out(f"problem {number}", share) for number in range(20_000))
    assert held_out / 20_000 == pytest.approx(share, abs=0.015)


def test_evaluation_gives_different_problems_up_to_all_there_are() -> None:
    task = make_single_task(TaskConfig(), seed=0)
    asked = task.evaluation(100)
    assert len({problem.prompt for problem in asked}) == 100
    assert set(map(operands, asked)) <= set(map(operands, task.held_out))
    assert list(task.evaluation(50)) == list(asked[:50])
    assert len(task.evaluation(10**9)) == len(task.held_out)


def test_a_task_without_problems_says_what_to_change() -> None:
    with pytest.raises(InputError, match=r"no problems are left to train on; lower task\.held_out"):
        make_task(TaskConfig(held_out=0.999999), 0)
    empty = make_task(TaskConfig(held_out=1e-9), 0)
    with pytest.raises(InputError, match=r"no problems are held out to evaluate on; raise task\.held_out"):
        empty.evaluation(1)
    assert list(empty.evaluation(0)) == []


def test_only_problems_that_are_asked_are_made() -> None:
    """A task may hold a million of them."""
    made: list[str] = []

    def make(number: int) -> Problem:
        made.append(str(number))
        return Problem(str(number), str(number))

    task = Task(Lazily(make, range(1_000_000)), Lazily(make, range(1_000_000, 1_000_010)), seed=0)
    asked = [task.problem(ordinal).prompt for ordinal in range(5)]
    assert made == asked and len(set(asked)) == 5
    assert len(task.evaluation(3)) == 3
    assert len(made) == 8
    assert [problem.answer for problem in Lazily(make, range(10))[2:4]] == ["2", "3"]
