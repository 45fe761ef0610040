"""Whole jobs of a model with experts: what sampled a token is replayed when it is trained, also after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.experts import small_mixture
from helpers.fingerprint import fingerprint
from helpers.killing import KillAt, Killed

from llamarl import Job, Run
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit

UPDATES = 4


def settings(*more: str) -> list[str]:
    return [
        *small_mixture(),
        f"schedule.updates={UPDATES}",
        "schedule.groups_per_update=4",
        "schedule.samples_per_group=4",
        "schedule.probe_every=2",
        "schedule.deterministic=true",
        "engine=inline",
        "snapshots.every=2",
        "evaluate.prompts=8",
        "trainer.threads=1",
        "generator.threads=1",
        *more,
    ]


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_job_that_was_killed_replays_the_same_experts_as_one_that_was_not(tmp_path: Path) -> None:
    Job(load_config(None, settings())).run(tmp_path / "straight")
    rows = rows_of(tmp_path / "straight")
    assert [row["replayed_share"] for row in rows] == [1.0] * UPDATES
    assert any("probe_route_shortfall_max" in row for row in rows)
    assert all(0 <= row["route_diff_share"] < 0.5 and row["expert_load_max"] > 1 for row in rows)
    with pytest.raises(Killed):
        Job(load_config(None, settings()), builders={"trainer": KillAt(3)}).run(tmp_path / "killed")
    Job.resume(tmp_path / "killed")
    assert fingerprint(tmp_path / "killed", UPDATES) == fingerprint(tmp_path / "straight", UPDATES)
    assert audit(read_ledger(tmp_path / "killed" / "ledger")).clean
    kept = list(Run(tmp_path / "straight").rollouts.groups(0))
    assert kept and all(len(group.rollouts) == 4 for group in kept), "rollouts stay readable"
    segments = [*(tmp_path / "straight" / "rollouts" / "groups").rglob("*")]
    assert not any(b"routes" in one.read_bytes() for one in segments if one.is_file()), "without their experts"


def test_without_replay_nothing_is_recorded(tmp_path: Path) -> None:
    Job(load_config(None, settings("trainer.replay_routes=false"))).run(tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert all("expert_load_max" in row and "replayed_share" not in row for row in rows)


def test_a_balancing_loss_is_learned_from_rollouts_and_from_rows(tmp_path: Path) -> None:
    rows = ["sft.path=examples/data/additions.jsonl", "sft.epochs=0"]
    for name, more in {"rl": [], "sft": rows}.items():
        Job(load_config(None, settings("trainer.balance_loss=1.0", *more))).run(tmp_path / name)
        found = [row["balance_loss"] for row in rows_of(tmp_path / name)]
        assert len(found) == UPDATES and all(1.99 <= one < 6.0 for one in found), (
            "about k where all experts are used equally"
        )


AGENT = """
async def run(problem, client):
    chat = [{"role": "user", "content": problem.prompt}]
    said = (await client.chat(chat))["content"] or ""
    await client.chat([*chat, {"role": "assistant", "content": said}, {"role": "user", "content": "1="}])
    await client.chat([*chat, {"role": "assistant", "content": said + "7"}, {"role": "user", "content": "3="}])
    return {"reward": len(said)}
"""


def test_answers_to_agents_are_replayed_too(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENT)
    more = [
        "algo.zero_variance=keep",
        f"agent.run={tmp_path / 'agents.py'}:run",
        "agent.workers=2",
        "schedule.max_staleness=0",
    ]
    asked = [one for one in settings(*more) if not one.startswith(("reward.", "schedule.deterministic"))]
    Job(load_config(None, [*asked, "schedule.updates=2", "snapshots.every=0"])).run(tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert [row["replayed_share"] for row in rows] == [1.0, 1.0]
    assert all(row["route_shortfall_max"] < 1e-3 for row in rows), "of the tokens that they belong to"
