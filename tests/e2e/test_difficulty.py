"""Dynamic sampling and a curriculum in whole jobs: killed and resumed or not, the same bytes and a clean audit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from helpers.cli import llamarl
from helpers.engines import ENGINE
from helpers.fingerprint import fingerprint
from helpers.killing import TINY, KillAt, Killed
from msgspec.structs import replace

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import Replaced, read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.engine.curriculum_log import read_curriculum
from llamarl.io.record_log import SegmentWriter
from llamarl.observe.run_folder import CURRICULUM

UPDATES = 10


def settings(*more: str) -> list[str]:
    return [
        *TINY,
        f"schedule.updates={UPDATES}",
        "schedule.dynamic_sampling=3",
        "snapshots.every=3",
        "task.max_operand=9",
        "generator.temperature=1.5",  # the tiny model knows these sums; so it fails at some
        "task.curriculum=true",
        "evaluate.prompts=8",
        *more,
    ]


def check(run: Path) -> list[dict[str, float]]:
    """The audit is clean, a replay writes the same, and metrics count what the ledger does. Returns the metrics."""
    assert llamarl("audit", run).code == 0
    assert llamarl("replay", run).code == 0
    found = audit(read_ledger(run / "ledger"))
    replaced = sum(isinstance(record, Replaced) for record in read_ledger(run / "ledger"))
    assert (found.trained + sum(found.dropped.values()), sum(found.dropped.values())) == (found.num_groups, replaced)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["groups_replaced"] for row in rows) == replaced > 0
    assert all(row["groups_replaced"] <= 3 for row in rows)
    assert all(row["curriculum_unseen"] >= after["curriculum_unseen"] for row, after in pairwise(rows))
    _, outcomes = read_curriculum(run / CURRICULUM)
    assert len(outcomes) == found.num_groups
    return rows


@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_and_resumed_equals_never_killed(staleness: int, tmp_path: Path) -> None:
    exact = settings("engine=inline", "schedule.deterministic=true", f"schedule.max_staleness={staleness}")
    config = load_config(None, exact)
    Job(config).run(tmp_path / "straight")
    with pytest.raises(Killed):
        Job(config, builders={"trainer": KillAt(5)}).run(tmp_path / "killed")
    Job.resume(tmp_path / "killed")
    assert fingerprint(tmp_path / "killed", UPDATES) == fingerprint(tmp_path / "straight", UPDATES)
    assert check(tmp_path / "killed") == check(tmp_path / "straight")


def test_an_asynchronous_job_with_a_window_is_killed_and_ends_clean(tmp_path: Path) -> None:
    config = load_config(None, settings("engine=inline", "schedule.max_staleness=2", "schedule.window=4"))
    with pytest.raises(Killed):
        Job(config, builders={"trainer": KillAt(7)}).run(tmp_path / "run")
    Job.resume(tmp_path / "run")
    check(tmp_path / "run")


def test_processes_of_their_own_train_it_too(tmp_path: Path) -> None:
    Job(load_config(None, settings(f"engine={ENGINE}", "generator.replicas=2"))).run(tmp_path / "run")
    check(tmp_path / "run")


def test_an_altered_record_of_the_curriculum_fails_the_audit(tmp_path: Path) -> None:
    Job(load_config(None, settings("engine=inline"))).run(tmp_path / "run")
    rule, outcomes = read_curriculum(tmp_path / "run" / CURRICULUM)
    assert rule is not None
    for path in (tmp_path / "run" / CURRICULUM).iterdir():
        path.unlink()
    writer = SegmentWriter(tmp_path / "run" / CURRICULUM)
    for record in (rule, *(replace(o, number=(o.number + 1) % 10) if o.ordinal == 2 else o for o in outcomes)):
        writer.append(msgspec.json.encode(record))
    writer.close()
    code, out, _ = llamarl("audit", tmp_path / "run")
    assert code == 1
    assert "NOT as the curriculum says: groups asked another problem than the rule says: 2" in out
