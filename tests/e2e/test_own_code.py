"""What goes wrong in a user's own function is told at once, with file and line, and in full in the log."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.brief import BRIEF
from helpers.cli import llamarl
from helpers.notes import Notes

from llamarl import Job
from llamarl.algo.custom_loss import MEASURED
from llamarl.errors import ConfigError, JobFailed

SCORER = """
def score(completion, answer, prompt):
    if completion == answer:
        return 1.0
    digits = [int(char) for char in completion + "!"]
    return 0.0
"""
LOSS = """
from llamarl.algo.losses import aipo_loss


def loss(tokens, algo):
    if tokens.num_tokens > 9:  # more than it is tried on

        raise RuntimeError("out of luck")
    return aipo_loss(tokens, algo)
"""
TOOL = """
def tool(said, turns):
    raise LookupError("nothing here")
"""
engines = pytest.mark.parametrize("engine", ["inline", "local"])


def one_log(run: Path) -> str:
    return "\n".join(path.read_text() for path in (run / "logs").iterdir())


@engines
def test_a_scorer_that_raises_is_told_with_its_line_and_its_traceback(tmp_path: Path, engine: str) -> None:
    (tmp_path / "my.py").write_text(SCORER)
    notes, run = Notes(), tmp_path / "run"
    job = Job.load(None, [*BRIEF, f"engine={engine}", f"reward.scorer={tmp_path}/my.py:score", "reward.workers=1"])
    with pytest.raises(JobFailed) as failed:
        job.run(run, display=notes)
    told = f"the last: scorer failed: ValueError: invalid literal for int() with base 10: '!' ({tmp_path}/my.py:5)"
    assert told in str(failed.value)
    assert str(failed.value).endswith(f"see {run}/logs/reward-0.log")
    first = [note for note in notes.seen if note.startswith("reward/0: scorer failed: ValueError")]
    assert len(first) == 1 and first[0].endswith(f"my.py:5); see {run}/logs/reward-0.log"), notes.seen
    log = (run / "logs" / "reward-0.log").read_text()
    assert "digits = [int(char) for char in completion" in log
    assert log.count("Traceback (most recent call last)") == 1


@engines
def test_a_loss_that_raises_while_training_ends_the_job_once(tmp_path: Path, engine: str) -> None:
    (tmp_path / "my.py").write_text(LOSS)
    notes, run = Notes(), tmp_path / "run"
    job = Job.load(None, [*BRIEF, f"engine={engine}", f"algo.loss={tmp_path}/my.py:loss", "algo.zero_variance=keep"])
    with pytest.raises(JobFailed) as failed:
        job.run(run, display=notes)
    assert failed.value.exit_code == 3
    assert f"my.py:loss failed: RuntimeError: out of luck ({tmp_path}/my.py:8); see {run}/logs/" in str(failed.value)
    assert 'raise RuntimeError("out of luck")' in one_log(run)
    assert not any("died" in note for note in notes.seen)


def test_a_loss_that_raises_on_one_rank_ends_the_job_once(tmp_path: Path) -> None:
    """The other rank waits for it; nobody is started anew."""
    (tmp_path / "my.py").write_text(
        "import torch.distributed as dist\nfrom llamarl.algo.losses import aipo_loss\n\n"
        "def loss(tokens, algo):\n    if dist.is_initialized() and dist.get_rank() == 1:\n"
        "        raise RuntimeError('only here')\n    return aipo_loss(tokens, algo)\n"
    )
    notes, chosen = Notes(), [f"algo.loss={tmp_path}/my.py:loss", "algo.zero_variance=keep", "trainer.data=2"]
    with pytest.raises(
        JobFailed, match=r"trainer/0: algo\.loss: .*RuntimeError: only here \(.*my\.py:6\); see .*trainer-0"
    ):
        Job.load(None, [*BRIEF, "engine=local", *chosen]).run(tmp_path / "run", display=notes)
    assert not any("died" in note for note in notes.seen)


def test_a_loss_that_raises_always_stops_the_job_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(LOSS.replace("> 9", "> 0"))
    with pytest.raises(ConfigError, match=r"my\.py:loss failed: RuntimeError: out of luck \(.*my\.py:8\)"):
        Job.load(None, [*BRIEF, f"algo.loss={tmp_path}/my.py:loss"])


def test_the_metrics_that_a_loss_may_not_name_are_those_of_every_update(tmp_path: Path) -> None:
    Job.load(None, [*BRIEF, "algo.loss=reinforce"]).run(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    of_versions = re.compile(r"staleness_share_\d+|kl_behavior_s\d+")
    assert {name for row in rows for name in row if not of_versions.fullmatch(name)} == MEASURED


def test_a_scorer_that_gives_one_reward_for_all_answers_stops_the_job_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def score(completions, **columns):\n    return [1.0]\n")
    with pytest.raises(ConfigError, match="scorer gave 1 reward for 2 completions"):
        Job.load(None, [*BRIEF, f"reward.scorer={tmp_path}/my.py:score"])


def test_processes_have_the_names_of_their_executors(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "def score(completion, answer):\n    return float(open('/proc/self/comm').read().strip() == 'reward/0')\n"
    )
    chosen = [f"reward.scorer={tmp_path}/my.py:score", "reward.trusted=true", "algo.zero_variance=keep"]
    summary = Job.load(None, [*BRIEF, "engine=local", *chosen]).run(tmp_path / "run")
    assert (summary.reward_first, summary.reward_last) == (1.0, 1.0)


@engines
def test_a_tool_that_raises_is_told_with_its_line_and_its_traceback(tmp_path: Path, engine: str) -> None:
    (tmp_path / "my.py").write_text(TOOL)
    notes, run = Notes(), tmp_path / "run"
    settings = [f"conversation.tool={tmp_path}/my.py:tool", "conversation.workers=1", "generator.max_prompt_tokens=64"]
    job = Job.load(None, [*BRIEF, f"engine={engine}", *settings, "schedule.updates=8"])
    with pytest.raises(JobFailed) as failed:
        job.run(run, display=notes)
    assert f"the last: tool failed: LookupError: nothing here ({tmp_path}/my.py:3); see {run}" in str(failed.value)
    assert len([note for note in notes.seen if note.startswith("generator/0: tool failed")]) == 1
    assert 'raise LookupError("nothing here")' in (run / "logs" / "generator-0.log").read_text()


def test_a_tool_with_other_parameters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def tool(said):\n    return said\n")
    with pytest.raises(ConfigError, match=r"conversation\.tool: .*my\.py:tool cannot be called with \(said, turns\)"):
        Job.load(None, [*BRIEF, f"conversation.tool={tmp_path}/my.py:tool"])


def test_an_evaluation_brings_the_columns_that_a_scorer_asks_for(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "difficulty": 3} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my.py").write_text("def score(completion, difficulty):\n    return float(difficulty)\n")
    chosen = [f"task.path={tmp_path}/train.jsonl", "task.held_out=0.5", f"reward.scorer={tmp_path}/my.py:score"]
    code, out, err = llamarl("eval", "tiny", "jsonl", *chosen, "generator.max_new_tokens=4", "--json")
    assert code == 0, err
    assert json.loads(out)["accuracy"] == 3.0
