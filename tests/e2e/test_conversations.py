"""Whole jobs whose answers have several turns: they learn to use a tool, whatever the engine, the timing or the crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.fingerprint import fingerprint
from helpers.killing import KillAt, Killed

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "calculator.yaml"
SMALL = [
    "task.max_operand=99",
    "schedule.groups_per_update=3",
    "schedule.samples_per_group=3",
    "generator.slots=16",
    "evaluate.prompts=3",
    "reward.scorer=length",
    "reward.max_chars=16",
    "evaluate.every=0",
    "trainer.warmup_updates=0",
    "schedule.probe_every=2",
    "conversation.workers=1",
]
# Every second turn is answered, as late as it likes; each reply depends on what was said.
TOOL = """
import time, zlib
def tool(said, turns):
    number = zlib.crc32("".join(turn["content"] for turn in turns).encode())
    time.sleep(number % 3 * 0.004)
    if "hang" in __file__ and number % 5 == 0:
        time.sleep(60)
    if "crash" in __file__ and number % 5 == 0:
        raise RuntimeError("lost")
    return None if number % 2 else str(number % 1000) + "="
"""


def rows_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_model_learns_to_use_the_calculator(tmp_path: Path) -> None:
    """Sums up to 299, of which it knows few: it finds out that handing over brings the result."""
    settings = [
        "engine=inline",
        "schedule.max_staleness=0",
        "schedule.groups_per_update=32",
        "schedule.updates=14",
        "generator.slots=256",
        "generator.temperature=2.5",
        "trainer.lr=5e-4",
        "evaluate.prompts=64",
        "evaluate.every=0",
        "snapshots.every=0",
    ]
    summary = Job.load(EXAMPLE, settings).run(tmp_path / "run")
    assert summary.eval_before is not None and summary.eval_after is not None
    assert summary.eval_before < 0.2 and summary.eval_after > 0.9
    assert summary.reward_last > summary.reward_first + 0.5
    assert (summary.tool_failures, summary.tool_timeouts, summary.groups_dropped) == (0, 0, 0)
    found = llamarl("eval", tmp_path / "run" / summary.policy, EXAMPLE, "--problems", "32", "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["accuracy"] > 0.9


def own_tool(folder: Path, name: str = "tool") -> list[str]:
    file = folder / f"{name}.py"
    file.write_text(TOOL)
    return [f"conversation.tool={file}:tool", "conversation.max_turns=3", "generator.max_new_tokens=24", *SMALL]


def test_deterministic_jobs_stay_so_on_any_engine_and_across_a_crash(tmp_path: Path) -> None:
    settings = [*own_tool(tmp_path), "schedule.updates=3", "schedule.deterministic=true", "snapshots.every=1"]
    settings += ["evaluate.prompts=1", "trainer.threads=1"]  # inline has the threads of this process, which is one
    Job(load_config(EXAMPLE, [*settings, "engine=inline"])).run(tmp_path / "inline")
    expected = fingerprint(tmp_path / "inline", 3)
    Job(load_config(EXAMPLE, [*settings, "generator.replicas=2"])).run(tmp_path / "local")
    assert fingerprint(tmp_path / "local", 3) == expected
    with pytest.raises(Killed):
        Job(load_config(EXAMPLE, [*settings, "engine=inline"]), builders={"trainer": KillAt(2)}).run(
            tmp_path / "killed"
        )
    Job.resume(tmp_path / "killed")
    assert fingerprint(tmp_path / "killed", 3) == expected


def test_ranks_of_one_generator_hold_the_same_conversation(tmp_path: Path) -> None:
    """The first one asks the tool and tells the others; each sampled token is as likely to the trainer as it was to them."""
    settings = [*own_tool(tmp_path), "generator.tensor=2", "schedule.updates=1", "schedule.max_staleness=0"]
    settings += ["evaluate.prompts=0", "snapshots.every=0"]
    summary = Job(load_config(EXAMPLE, settings)).run(tmp_path / "run")
    assert (summary.updates, summary.groups_dropped, summary.restarts) == (1, 0, 0)
    gaps = [row["logprob_gap"] for row in rows_of(tmp_path / "run" / "metrics.jsonl") if "logprob_gap" in row]
    assert gaps and max(gaps) < 1e-4


@pytest.mark.parametrize(("how", "counted"), [("crash", "tool_failures"), ("hang", "tool_timeouts")])
def test_failures_of_a_tool_are_counted_apart_and_drop_their_group(how: str, counted: str, tmp_path: Path) -> None:
    settings = [
        *own_tool(tmp_path, f"{how}ing"),
        "engine=inline",
        "schedule.updates=2",
        f"conversation.timeout_s={0.25 if counted == 'tool_timeouts' else 30}",
        "conversation.retries=0",
        "conversation.max_failure_share=1",
        "evaluate.prompts=0",
    ]
    summary = Job(load_config(EXAMPLE, settings)).run(tmp_path / "run")
    told = {"tool_failures": summary.tool_failures, "tool_timeouts": summary.tool_timeouts}
    assert 0 < summary.groups_dropped <= told.pop(counted)
    assert list(told.values()) == [0] and summary.score_failures == 0
    assert summary.groups_dropped + summary.groups_trained == 6
    written = sum(row[counted] for row in rows_of(tmp_path / "run" / "timings.jsonl") if "update" in row)
    assert 0 < written <= getattr(summary, counted)
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean


def test_a_tool_that_fails_too_often_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    settings = [
        *own_tool(tmp_path, "crashing"),
        "engine=inline",
        "conversation.max_failure_share=0.01",
        "evaluate.prompts=0",
    ]
    overrides = [*settings, "conversation.retries=0", "schedule.updates=20"]
    done = llamarl("train", EXAMPLE, *overrides, "--run", tmp_path / "run")
    assert done.code == 3
    assert "calls of the tool failed; more than conversation.max_failure_share=0.01" in done.err
