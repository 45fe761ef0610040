"""What would fail on every group, or quietly measure the wrong thing, is noticed before a job starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llamarl import Job
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.errors import ConfigError


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def score(completion):\n    return None\n", "fails on the first problem's own answer .* gave None"),
        ("def score(text):\n    return 1.0\n", r"cannot be called with \(completion, answer, prompt\)"),
        ("def score(completion, level):\n    return 1.0\n", "asks for 'level', which is no column of the data"),
        ("def score(completion, answer, prompt):\n    return float('nan')\n", "gave nan"),
        ("def score(completion, answer, prompt):\n    return 'high'\n", "gave 'high'; it must give a number"),
    ],
)
def test_a_scorer_that_cannot_judge_is_refused_before_the_start(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(ConfigError, match=message):
        Job(load_config(None, [f"reward.scorer={tmp_path}/mine.py:score"]))


def test_a_small_task_is_evaluated_on_each_held_out_problem_once(tmp_path: Path) -> None:
    settings = ["task.max_operand=9", "schedule.updates=1", "schedule.groups_per_update=2", "engine=inline"]
    summary = Job(load_config(None, [*settings, "generator.slots=32", "evaluate.prompts=500"])).run(tmp_path / "run")
    assert summary.eval_before is not None
    count = len(Job(load_config(None, settings))._prepared.prompts._evaluation)
    assert count < 100
    assert round(summary.eval_before * count, 6).is_integer()


def test_a_tool_that_cannot_be_loaded_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('no license')\n")
    with pytest.raises(ConfigError, match=r"conversation\.tool: .*no license"):
        Job(load_config(None, [f"conversation.tool={tmp_path}/mine.py:tool"]))


def test_a_chat_template_that_takes_no_replies_is_refused_before_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Config().model_folder, folder)
    hiding = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(hiding)
    with pytest.raises(ConfigError, match=r"conversation\.role: user cannot reply in this model's chats"):
        Job(load_config(None, [f"model.path={folder}", "task.chat=true", "conversation.tool=calculator"]))
