"""Whole jobs in environments: the three example games, trained through the endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.brief import BRIEF, ROOT
from helpers.cli import llamarl

from llamarl import Run
from llamarl.runs.rollouts import KeptGroup

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")
SMALL = [
    *BRIEF,
    "schedule.groups_per_update=2",
    "evaluate.prompts=1",
    "evaluate.every=0",
    "agent.workers=2",
    "generator.threads=1",
    "trainer.threads=1",
    "algo.zero_variance=keep",
    "snapshots.at_end=none",
]


def trained(game: str, run: Path, *settings: str) -> list[KeptGroup]:
    """The groups that an example's job trained on, after its books were checked."""
    code, _, err = llamarl("train", f"examples/{game}.yaml", *SMALL, *settings, "--run", run)
    assert (code, err) == (0, "")
    assert llamarl("audit", run).code == 0
    told = Run(run)
    assert told.summary is not None and isinstance(told.summary.agents, dict)
    assert told.summary.agents["agent_failures"] == told.summary.agents["agent_unmatched"] == 0
    assert told.summary.groups_dropped == 0 and told.summary.updates == 2
    # The trainer computes for every sampled token what the generator had: all turns stand where they were sampled.
    assert max(told.metrics()["logprob_gap"]) < 1e-4
    rows = [json.loads(line) for line in llamarl("rollouts", run, "--json").out.splitlines()]
    assert rows and all({"sample", "player"} <= row.keys() for row in rows)
    return [group for update in told.rollouts.updates for group in told.rollouts.groups(update)]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("game", ["guess_number", "maze"])
def test_games_of_several_turns_train(game: str, tmp_path: Path) -> None:
    groups = trained(game, tmp_path / "run")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.player for rollout in rollouts} == {0}
    assert max(rollout.parts["turns"] for rollout in rollouts) > 1
    assert len({rollout.reward for rollout in rollouts}) > 1


def test_both_sides_of_a_game_train_with_their_own_rewards(tmp_path: Path) -> None:
    groups = trained("nim", tmp_path / "run")
    first, second = (
        {(group.ordinal, one.sample): one.reward for group in groups for one in group.rollouts if one.player == player}
        for player in (0, 1)
    )
    assert second, "the second player never had a turn"
    # Who made a move that is not allowed loses alone; otherwise one wins what the other loses.
    assert {(first[game], reward) for game, reward in second.items()} <= {(-1, 0), (0, -1), (1, -1), (-1, 1)}


def test_tools_need_a_chat_template_that_takes_them(tmp_path: Path) -> None:
    settings = [*SMALL, "agent.environment=examples/maze.py:Maze"]
    code, _, err = llamarl("train", "examples/maze.yaml", *settings, "--run", tmp_path / "run")
    assert code == 2 and len(err.splitlines()) == 1
    assert "agent.environment: its methods are tools, but the model's chat template takes none" in err
