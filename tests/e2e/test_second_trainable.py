"""A role is added by declaring it: a critic that trains joins the line, and no file of the project changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.critic import build_critic

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.controller.line import Channel, Line, Role

TINY = [
    "schedule.updates=4",
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "generator.slots=32",
    "generator.threads=1",
    "trainer.threads=1",
    "evaluate.prompts=0",
]


def line_with_critic(line: Line) -> Line:
    channels = [channel for channel in line.channels if channel.name != "rollouts"]
    return Line(
        [*line.roles, Role(name="critic", unit="batch", done="regressed", threads=1)],
        [
            *channels,
            Channel("rollouts", "groups", "reward", "critic"),
            Channel("valued", "groups", "critic", "trainer"),
        ],
    )


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_critic_trains_beside_the_policy(engine: str, tmp_path: Path) -> None:
    config = load_config(None, [*TINY, f"engine={engine}"])
    job = Job(config, line=line_with_critic(default_line(config)), builders={"critic": build_critic})
    summary = job.run(tmp_path / "run")
    assert summary.updates == 4
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean
    rows = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [(row["update"], row["role"]) for row in rows if "role" in row]
    assert sorted(trained) == [(update, role) for update in range(4) for role in ("critic", "trainer")]
    values = [row["value"] for row in rows if row.get("role") == "critic"]
    assert values[-1] > 0.0, "the critic has moved towards the mean reward"
    assert (tmp_path / "run" / "snapshots" / "4" / "critic" / "critic.safetensors").is_file()
    assert (tmp_path / "run" / "snapshots" / "4" / "policy" / "model.safetensors").is_file()
