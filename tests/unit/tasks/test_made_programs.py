"""Problems that examples/data/make_programs.py makes: the same each time, all different, solved by their solutions."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.sandboxes import skip_without_sandbox

from llamarl.config import DatasetConfig, RewardConfig
from llamarl.tasks.datasets import KINDS, read_examples
from llamarl.tasks.judge import Judge
from llamarl.tasks.programs import same_value
from llamarl.types import Problem

SCRIPT = Path(__file__).parents[3] / "examples" / "data" / "make_programs.py"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("make_programs", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(script: Any) -> Rows:
    made: Rows = script.make_problems(60, seed=0)
    return made


def run_script(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), str(folder), "--train", "20", "--test", "5", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def defined_by(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102, our own
    return names["solve"]


def test_a_seed_gives_the_same_problems(script: Any, rows: Rows) -> None:
    assert script.make_problems(60, seed=0) == rows
    assert script.make_problems(60, seed=1) != rows


def test_files_have_no_problem_in_common_and_are_not_written_over(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    assert [run_script(folder)[0] for folder in folders] == [0, 0]
    first, second = ([(folder / f"{name}.jsonl").read_text() for name in ("train", "test")] for folder in folders)
    assert first == second
    train, test = ({json.loads(line)["solution"] for line in text.splitlines()} for text in first)
    assert (len(train), len(test), train & test) == (20, 5, set())
    code, err = run_script(folders[0], "--seed", "1")
    assert code == 2 and "already there" in err
    assert run_script(tmp_path / "three", "--test", "0")[0] == 2


def test_a_job_reads_both_files_and_no_solution(tmp_path: Path) -> None:
    assert run_script(tmp_path / "made")[0] == 0
    found = read_examples(DatasetConfig(kind="code", path=str(tmp_path / "made"), held_out=1e-9))
    assert (len(found.train), len(found.test)) == (20, 5)
    for example in (*found.train, *found.test):
        assert not example.solution and not example.columns
        assert "return v" not in example.question + example.answer


def test_every_solution_passes_its_tests(rows: Rows) -> None:
    for row in rows:
        solve = defined_by(row["solution"])
        for test in row["tests"]:
            value = json.loads(json.dumps(solve(*test["args"])))
            assert test["call"] == "solve" and same_value(value, test["expected"]), row


def test_steps_are_mixed_and_none_is_in_vain(rows: Rows) -> None:
    assert [sum(row["steps"] == steps for row in rows) for steps in (2, 3, 4)] == [24, 24, 12]
    for row in rows:
        expected = [json.dumps(test["expected"]) for test in row["tests"]]
        assert len(expected) == 8 and max(map(expected.count, expected)) <= 3
        lines = row["solution"].splitlines()
        for number, line in enumerate(lines):
            if not line.startswith("    v = ") or line in ("    v = xs", "    v = s", "    v = words"):
                continue
            less = defined_by("\n".join([*lines[:number], *lines[number + 1 :]]))
            assert fails_one(less, row["tests"]), f"nothing notices that this is missing: {line}\n{row['solution']}"


def fails_one(solve: Any, tests: Rows) -> bool:
    try:
        return not all(same_value(solve(*test["args"]), test["expected"]) for test in tests)
    except (AttributeError, TypeError):  # it was a step from one type to another
        return True


def head_of(row: dict[str, Any]) -> str:
    return str(row["solution"].partition("def ")[2].partition(":")[0])


def test_no_problem_is_solved_by_a_shorter_one(rows: Rows) -> None:
    for row in rows:
        for other in rows:
            if head_of(other) == head_of(row) and other["steps"] < row["steps"]:
                assert fails_one(defined_by(other["solution"]), row["tests"]), (row["prompt"], other["prompt"])


def test_prompts_are_short_and_name_the_function(rows: Rows) -> None:
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert head_of(row) in row["prompt"] and len(row["prompt"]) < 1400
        assert "{" not in row["prompt"]
    assert "```python" in KINDS["code"].template, "problems leave it to the template to say what an answer is"


@pytest.mark.parametrize(
    ("wording", "value", "expected"),
    [
        ("multiples of {k}", [0, -6, 4, 9], [0, -6, 9]),
        ("average of the list", [1, 2, 3, 6], [6]),
        ("exactly once", [3, 1, 3, 2], [1, 2]),
        ("modulo {k}", [-1, 7, 3], [2, 1, 0]),
        ("decimal digits", [-27, 105, 0], [9, 6, 0]),
        ("differences of neighbors", [5, 3, 9], [-2, 6]),
        ("larger number of each two", [5, 3, 9], [5, 9]),
        ("into blocks of {k}", [1, 2, 3, 4], [6, 4]),
        ("swap the first number", [1, 2, 3, 4, 5], [2, 1, 4, 3, 5]),
        ("rotate the list", [1, 2, 3, 4], [4, 1, 2, 3]),
        ("rotate the list", [1, 2], [2, 1]),
        ("last decimal digit", [27, -17, 30, 41], [30, 41, -17, 27]),
        ("sort by absolute value", [3, -1, -3, 2], [-1, 2, -3, 3]),
        ("replace each run of equal neighbors by", [7, 7, 2, 7], [2, 1, 1]),
        ("smaller than it", [4, 1, 4, 9], [1, 0, 1, 3]),
        ("first number minus the second plus", [5, 3, 9, 1], 10),
        ("occurs most often", [4, 2, 4, 2, 9], 2),
        ("second largest", [9, 9, 4], 4),
        ("second largest", [9, 9], 0),
        ("index of the largest", [1, 8, 8], 1),
        ("letter at index", [0, 25, 26, -1], "azaz"),
        ("run of equal characters by", "aab", "a2b1"),
        ("shift every letter", "xyZ 9a", "abC 9d"),
        ("position in the alphabet", "aZ 1b", [1, 26, 2]),
        ("indices of all vowels", "A tree", [0, 4, 5]),
        ("several blanks count as one", " a  bc ", ["a", "bc"]),
        ("end of that word", ["abc", "d"], ["bca", "d"]),
        ("words by length", ["bb", "a", "B", "AA"], ["B", "a", "AA", "bb"]),
    ],
)
def test_a_step_does_what_it_says(script: Any, wording: str, value: Any, expected: Any) -> None:
    """With k = 3. Values were worked out by hand, from the words."""
    (step,) = [step for step in script.read_steps() if wording in " | ".join(step.wordings)]
    assert script.compiled(step.code.replace("{k}", "3"))(value, 3) == expected


def test_of_what_is_empty_a_step_makes_what_it_says(script: Any) -> None:
    empty: dict[str, Any] = {"numbers": [], "text": "", "words": []}
    for step in script.read_steps():
        given = script.compiled(step.code.replace("{k}", "3"))(empty[step.takes], 3)
        if step.gives == "number":
            assert all(f"{given} " in said or f" {given})" in said or "is 0" in said for said in step.wordings), step
        else:
            assert given == empty[step.gives], step


def test_the_scorer_pays_solutions_and_nothing_else(rows: Rows) -> None:
    skip_without_sandbox()
    judge = Judge(RewardConfig(scorer="code", workers=2, retries=0))
    for number, row in enumerate(rows[:3]):
        problem = Problem(row["prompt"], json.dumps(row["tests"]))
        for kind, program in (("right", row["solution"]), ("wrong", "def solve(*given):\n    return given[0]\n")):
            judge.ask((number, kind), f"So:\n```python\n{program}```", problem)
    found: dict[object, float] = {}
    while judge.num_pending:
        found |= {key: outcome.reward for key, outcome in judge.collect(1.0)}
    judge.close()
    assert found == {(number, kind): float(kind == "right") for number in range(3) for kind in ("right", "wrong")}
