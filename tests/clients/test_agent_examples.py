"""The example agents with real clients train the model that ships with LlamaRL."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl import Job

ROOT = Path(__file__).parents[2]
SMALL = [
    "engine=inline",
    "schedule.updates=2",
    "schedule.groups_per_update=2",
    "schedule.samples_per_group=3",
    "generator.slots=16",
    "generator.threads=1",
    "trainer.threads=1",
    "evaluate.prompts=2",
    "agent.workers=1",
    "snapshots.at_end=none",
]


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_an_agent_with_a_real_client_trains(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(client)
    monkeypatch.chdir(ROOT)
    settings = [*SMALL, f"agent.run=examples/agent_{client}.py:run"]
    summary = Job.load(ROOT / "examples" / "agent_calculator.yaml", settings).run(tmp_path / "run")
    assert (summary.outcome, summary.updates, summary.groups_dropped) == ("finished", 2, 0)
    assert isinstance(summary.agents, dict)
    assert summary.agents["agent_failures"] == summary.agents["agent_unmatched"] == 0
    assert summary.agents["agent_branches"] == summary.agents["agent_sessions"] == 2 * 2 * 3 + 2 * 2
