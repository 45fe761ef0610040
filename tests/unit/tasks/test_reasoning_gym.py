"""reasoning-gym's sets as tasks: by number, on two sides, scored by themselves in workers. With a stand-in package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from helpers.brief import BRIEF, ROOT, TINY
from helpers.cli import llamarl

from llamarl.config import Config, RewardConfig, TaskConfig
from llamarl.config.file import load_config
from llamarl.config.task import MixturePart
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.custom_scorers import ScorerRequirements
from llamarl.tasks.formulas import evaluate_formula
from llamarl.tasks.judge import Judge, Judgment
from llamarl.tasks.reasoning_gym import answer_in
from llamarl.tasks.registry import make_task
from llamarl.types import Problem

STAND_IN = ROOT / "tests" / "data" / "stand_ins"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the stand-in on the path, also for worker processes, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [STAND_IN, ROOT / "src"])))
    names = [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


def settings(**more: object) -> TaskConfig:
    return TaskConfig(**{"kind": "reasoning_gym", "datasets": {"sums": 1.0}, "template": "{prompt}", **more})  # type: ignore[arg-type]


def score(problem: Problem, *answers: str, **reward: object) -> list[Judgment]:
    judge = Judge(RewardConfig(workers=1, retries=0, **reward), ("reasoning_gym",))  # type: ignore[arg-type]
    try:
        return [judge.score(answer, problem) for answer in answers]
    finally:
        judge.close()


pytestmark = pytest.mark.usefixtures("stand_in")


def test_a_problem_follows_from_seed_and_ordinal_alone() -> None:
    straight = [make_task(settings(), 3).problem(ordinal) for ordinal in range(30)]
    fresh = make_task(settings(), 3)
    assert [fresh.problem(ordinal) for ordinal in reversed(range(30))] == straight[::-1]
    assert make_task(settings(), 4).problem(7) != straight[7]


def test_no_text_is_on_both_sides_even_where_there_are_few() -> None:
    task = make_task(settings(held_out=0.3, size=2000), 0)
    trained = {task.problem(ordinal).prompt for ordinal in range(500)}
    held_out = [problem.prompt for problem in task.evaluation(20)]
    assert len(held_out) == len(set(held_out)) == 20
    assert trained.isdisjoint(held_out)
    assert [problem.prompt for problem in make_task(settings(held_out=0.3, size=2000), 9).evaluation(20)] == held_out


def test_options_set_the_difficulty_and_weights_the_shares() -> None:
    hard = make_task(settings(options={"sums": {"max_operand": 999}}), 0)
    assert max(len(hard.problem(ordinal).prompt) for ordinal in range(50)) == len("999+999=")
    both = make_task(settings(datasets={"sums": 3.0, "hanging": 1.0}), 0)
    names = [both.problem(ordinal).columns["problem_set"]["name"] for ordinal in range(1000)]
    assert (names.count("sums"), names.count("hanging")) == (750, 250)
    parts = (MixturePart(kind="arithmetic", weight=1.0), MixturePart(kind="reasoning_gym", datasets={"sums": 1.0}))
    mixed = make_task(TaskConfig(kind="mixture", parts=parts), 0)
    scorers = [mixed.problem(ordinal).scorer for ordinal in range(1000)]
    assert (scorers.count("exact"), scorers.count("reasoning_gym")) == (500, 500)


def test_the_set_scores_its_own_answers_with_its_own_metadata() -> None:
    problem = make_task(settings(), 0).problem(0)
    right, wrong = problem.answer, str(int(problem.answer) + 1)
    found = score(problem, right, wrong, "no idea", f"so <answer> {right} </answer>", f"\\boxed{{{wrong}}}")
    assert [one.reason for one in found] == [""] * 5
    assert [one.reward for one in found] == [1.0, 0.1, 0.0, 1.0, 0.1]


def test_a_problem_is_made_once_for_all_answers() -> None:
    problem = make_task(settings(datasets={"slow": 1.0}), 0).problem(0)
    assert [one.reward for one in score(problem, "1", "2")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "source", "answer"),
    [
        ("<answer>1</answer> no: <answer>2</answer>", "auto", "2"),
        ("<answer><answer>3</answer>", "auto", "3"),
        ("<answer>4", "auto", "<answer>4"),
        ("it is \\boxed{5}", "auto", "5"),
        (" 6 ", "auto", "6"),
        ("<answer>7</answer>", "whole", "<answer>7</answer>"),
        ("it is 8", "last_number", "8"),
        ("none", "boxed", None),
    ],
)
def test_where_the_final_answer_is(text: str, source: str, answer: str | None) -> None:
    assert answer_in(text, source) == answer


def test_a_scorer_that_hangs_is_killed_and_its_answer_is_not_wrong() -> None:
    problem = make_task(settings(datasets={"hanging": 1.0}), 0).problem(0)
    found = score(problem, "-1", problem.answer, timeout_s=1.0)
    assert [one.status for one in found] == ["timeout", "ok"]


def test_a_scorer_can_only_compute_since_answers_are_hostile() -> None:
    problem = make_task(settings(datasets={"writing": 1.0}), 0).problem(0)
    (found,) = score(problem, "1")
    assert found.status == "error"
    assert "tried to open" in found.reason


def test_a_scorer_that_calls_eval_evaluates_formulas_and_nothing_else() -> None:
    problem = make_task(settings(datasets={"evaluating": 1.0}), 0).problem(0)
    formula, *hostile = score(
        problem, f"{problem.answer} + 2*3 - 6", "__import__('os').getpid()", "().__class__", "open"
    )
    assert (formula.status, formula.reward) == ("ok", 1.0)
    assert [(one.status, one.reward) for one in hostile] == [("ok", 0.0)] * 3, (
        "the set takes its own answer, so it is wrong"
    )


@pytest.mark.parametrize(
    ("text", "value"), [("(1+2)*3", 9), ("-7//2", -4), ("[1, [2, 'a']]", [1, [2, "a"]]), ("2**3 ^ 1", 9), ("5 >> 1", 2)]
)
def test_a_formula_has_the_value_that_python_gives_it(text: str, value: object) -> None:
    assert evaluate_formula(text) == value


@pytest.mark.parametrize(
    "text", ["print(1)", "a.b", "lambda: 1", "[x for x in (1,)]", "x", "f'{1}'", "1 if 1 else 2", b"1"]
)
def test_what_is_no_formula_is_a_syntax_error(text: object) -> None:
    with pytest.raises(SyntaxError):
        evaluate_formula(text, {"print": print}, {"a": object()})


def test_sympy_reads_expressions_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sympy = pytest.importorskip("sympy")
    monkeypatch.setattr("builtins.eval", evaluate_formula)
    x = sympy.Symbol("x")
    assert sympy.parse_expr("2*x + sin(pi/2)*3.5 - sqrt(4)", local_dict={"x": x}) == 2 * x + 1.5
    with pytest.raises(SyntaxError):
        sympy.parse_expr("__import__('os').getpid()")


def test_a_scorer_that_fails_on_its_own_answer_too_is_a_failure_not_a_wrong_answer() -> None:
    problem = make_task(settings(datasets={"raising": 1.0}), 0).problem(0)
    (found,) = score(problem, "1")
    assert (found.status, found.reason) == ("error", "the scorer of 'raising' failed: ValueError")


def test_a_set_that_makes_other_problems_in_every_process_is_told() -> None:
    task = make_task(settings(datasets={"unsteady": 1.0}, held_out=1e-9), 0)
    (found,) = score(task.problem(0), "1")
    assert found.status == "error"
    assert "in every process" in found.reason


def test_own_scorers_may_ask_for_metadata() -> None:
    wanted = ScorerRequirements(required={"metadata": "mine", "dataset": "mine"})
    problem = make_task(settings(), 0, wanted).problem(0)
    assert problem.columns["dataset"] == "sums"
    assert isinstance(problem.columns["metadata"]["operands"], list)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"datasets": {"summs": 1.0}}, "no set 'summs'; did you mean 'sums'"),
        ({"datasets": {"composite": 1.0}}, "no set 'composite'"),
        ({"options": {"sums": {"max_operand": -1}}}, "refuses those of 'sums': AssertionError: max_operand"),
        ({"options": {"sums": {"colour": "red"}}}, "refuses those of 'sums': TypeError"),
        ({"options": {"other": {}}}, "'other' is none of the sets"),
        ({"datasets": {}}, "name sets of reasoning-gym"),
        ({"datasets": {"sums": 0.0}}, "weights must be above 0"),
        ({"path": "x.jsonl"}, "makes its own problems"),
        ({"datasets": {"unmakeable": 1.0}}, "cannot make its problem .*no such puzzle"),
    ],
)
def test_what_a_user_can_get_wrong_is_told_in_one_line(wrong: dict[str, object], told: str) -> None:
    with pytest.raises((ConfigError, InputError), match=told) as error:
        make_task(settings(**wrong), 0).problem(0)
    assert "\n" not in str(error.value)


def test_a_set_with_too_few_problems_to_hold_some_out_is_told() -> None:
    with pytest.raises(InputError, match="too few different"):
        task = make_task(settings(datasets={"single": 1.0}), 0)
        task.problem(0), task.evaluation(1)


def test_evaluations_are_named_a_mean_reward() -> None:
    config = load_config(None, ["task.kind=reasoning_gym", "task.datasets={sums: 1}"])
    assert (config.score_name, Config().score_name) == ("mean reward", "accuracy")


def test_a_missing_package_is_one_line_that_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"pip install 'llamarl\[reasoning-gym\]'"):
        make_task(settings(), 0)


def test_no_process_of_another_job_imports_it() -> None:
    code = "import sys, llamarl, llamarl.tasks.registry; assert 'reasoning_gym' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_job_trains_on_a_set_and_its_audit_is_clean(tmp_path: Path) -> None:
    task = ["task.kind=reasoning_gym", "task.datasets={sums: 1}", "task.options={sums: {max_operand: 5}}"]
    code, _, err = llamarl("train", *BRIEF, *TINY, *task, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert llamarl("audit", tmp_path / "run").code == 0
    rewards = [line for line in islice((tmp_path / "run" / "metrics.jsonl").open(), 2)]
    assert len(rewards) == 2
