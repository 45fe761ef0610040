"""The real reasoning-gym: `make test-environments`. Elsewhere a stand-in takes its place (tests/unit/tasks)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.brief import BRIEF, ROOT, TINY
from helpers.cli import llamarl

from llamarl.config import RewardConfig, TaskConfig
from llamarl.config.file import load_config
from llamarl.tasks.judge import Judge
from llamarl.tasks.registry import make_task

pytest.importorskip("reasoning_gym")

SETS = (
    "chain_sum",
    "countdown",
    "arc_agi",
    "sudoku",
    "word_sorting",
    "spell_backward",
    "simple_equations",
    "family_relationships",
)


@pytest.mark.parametrize("name", SETS)
def test_a_set_accepts_its_own_answers_and_no_text_is_on_both_sides(name: str) -> None:
    task = make_task(TaskConfig(kind="reasoning_gym", datasets={name: 1.0}, size=500), 0)
    problems = [task.problem(ordinal) for ordinal in range(5)]
    assert [make_task(TaskConfig(kind="reasoning_gym", datasets={name: 1.0}, size=500), 0).problem(3)] == problems[3:4]
    assert {one.prompt for one in problems}.isdisjoint(one.prompt for one in task.evaluation(5))
    judge = Judge(RewardConfig(workers=1, timeout_s=10.0), ("reasoning_gym",))
    try:
        found = [judge.score(f"So: <answer>{one.answer}</answer>", one) for one in problems]
        nonsense = judge.score("I do not know", problems[0])
    finally:
        judge.close()
    assert [(one.status, one.reward) for one in found] == [("ok", 1.0)] * 5
    assert nonsense.status == "ok"
    assert nonsense.reward < 0.5


def test_the_example_asks_problems_of_both_sets() -> None:
    task = make_task(load_config(ROOT / "examples" / "reasoning_gym.yaml").task, 0)
    names = [task.problem(ordinal).columns["problem_set"]["name"] for ordinal in range(30)]
    assert set(names) == {"chain_sum", "countdown"}


def test_the_example_trains_with_the_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    small = [
        *BRIEF,
        *TINY,
        "schedule.updates=3",
        "evaluate.every=0",
        "schedule.dynamic_sampling=2",
        "reward.timeout_s=10",
        "task.datasets={chain_sum: 1}",
        "task.options={chain_sum: {min_terms: 2, max_terms: 2, max_digits: 1}}",
    ]
    code, _, err = llamarl("train", "examples/reasoning_gym.yaml", *small, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert llamarl("audit", tmp_path / "run").code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [0, 1, 2]
