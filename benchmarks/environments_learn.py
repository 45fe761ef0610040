"""Whether training in environments teaches anything: the three example games, played by the model that ships with LlamaRL.

    python benchmarks/environments_learn.py [GAME ...] [KEY=VALUE ...]   # minutes; writes benchmarks/results/environments.md

Each game is examples/GAME.yaml. In nim the policy plays both sides: the reward is the first player's, which loses by a move
that is not allowed, so it says how much of the rules was learned, and little about strategy.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.observe.summary import Summary

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "environments.md"
GAMES = ("guess_number", "maze", "nim")
SETTINGS = ["generator.threads=1", "trainer.threads=1", "evaluate.every=0", "snapshots.every=0"]


def run(game: str, settings: list[str]) -> Summary:
    config = load_config(ROOT / "examples" / f"{game}.yaml", [*SETTINGS, *settings])
    agent = replace(config.agent, environment=str(ROOT / config.agent.environment))
    config = replace(config, agent=agent, task=replace(config.task, path=str(ROOT / config.task.path)))
    with tempfile.TemporaryDirectory() as folder:
        return Job(config).run(Path(folder) / "run")


def row(game: str, summary: Summary) -> str:
    counts = summary.agents if isinstance(summary.agents, dict) else {}
    sessions = counts.get("agent_sessions", 0)
    return (
        f"| {game} | {summary.updates} | {summary.eval_before:.2f} | {summary.eval_after:.2f} | "
        f"{summary.reward_first:.2f} | {summary.reward_last:.2f} | {sessions:,} | "
        f"{counts.get('agent_calls', 0) / max(1, sessions):.2f} | "
        f"{counts.get('agent_failures', 0) + counts.get('agent_timeouts', 0)} | {summary.wall_s:.0f} |"
    )


def main() -> None:
    settings = [word for word in sys.argv[1:] if "=" in word]
    games = [word for word in sys.argv[1:] if "=" not in word] or [*GAMES]
    command = " ".join(["python benchmarks/environments_learn.py", *sys.argv[1:]])
    lines = [
        "# Training in environments",
        "",
        f"`{command}`: the example games ([environments](../../docs/environments.md)), through HTTP, on the model that",
        "ships with LlamaRL, which knows none of them. Two cores, shared with other work. Rewards are means of the first and",
        "last tenth of the updates; held-out problems are answered greedily. In nim the reward is the first player's.",
        "",
        "| game | updates | held-out before | after | reward at first | at last | sessions | calls each | failed | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(row(game, run(game, settings)) for game in games),
        "",
    ]
    RESULT.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
