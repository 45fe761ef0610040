"""What the data cannot give is told before the job starts: answers that no answer can hold, problems that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.config.file import load_config
from llamarl.engine.prompts import Prompts, check_lengths
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.registry import make_task


def told(folder: Path, answers: list[str], *settings: str) -> list[str]:
    data = folder / "data.jsonl"
    rows = ({"prompt": f"{number}+0=", "answer": answer} for number, answer in enumerate(answers))
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = load_config(None, ["task.kind=jsonl", f"task.path={data}", "task.held_out=0.3", *settings])
    prompts = Prompts(make_task(config.task, 0), Tokenizer.load(config.model_folder), config)
    return [*prompts.notes, *check_lengths(prompts, config)]


@pytest.mark.parametrize(
    ("settings", "noticed"),
    [
        ([], True),
        (["generator.max_new_tokens=40"], False),
        (["reward.scorer=length"], False),
        (["conversation.tool=calculator"], False),
        (["reward.scorer=numeric"], True),
        (["reward.scorer=math", "generator.max_new_tokens=20"], True),
    ],
    ids=["too long", "long enough", "another scorer", "several turns", "numeric", "math"],
)
def test_answers_that_cannot_be_given_are_noticed(tmp_path: Path, settings: list[str], noticed: bool) -> None:
    notes = told(tmp_path, ["1"] * 30 + ["1" * 30] * 10, "evaluate.prompts=1", *settings)
    expected = "tokens (the longest has 30), which cannot be given"
    assert any(expected in note for note in notes) == noticed, notes


def test_worked_solutions_as_answers_are_measured_by_what_they_end_with(tmp_path: Path) -> None:
    solutions = [f"We add zero to {number} and get \\boxed{{{number}}}." for number in range(40)]
    assert not told(tmp_path, solutions, "reward.scorer=math", "evaluate.prompts=5")


@pytest.mark.parametrize(("asked", "noticed"), [(5, False), (500, True)])
def test_fewer_problems_than_are_asked_for_are_told(tmp_path: Path, asked: int, noticed: bool) -> None:
    notes = told(tmp_path, ["1"] * 40, f"evaluate.prompts={asked}")
    assert any(f"all that there are of {asked} (evaluate.prompts)" in note for note in notes) == noticed, notes
