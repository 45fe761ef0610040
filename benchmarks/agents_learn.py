"""Whether training through the endpoint teaches anything: the calculator agent, and the same with permuted rewards.

    python benchmarks/agents_learn.py [KEY=VALUE ...]     # some minutes on two cores; writes benchmarks/results/agents.md

Both arms run examples/agent_calculator.yaml on the model that ships with LlamaRL, through HTTP. In the control, the rewards
of every training group are dealt out again at random among its samples: the same rewards, which say nothing of the answers.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from llamarl import Job
from llamarl.builders.agent import build_agents
from llamarl.builders.context import BuildContext, Builder
from llamarl.config.file import load_config
from llamarl.executors.executor import Executor
from llamarl.messages import GroupResult, Message, Report
from llamarl.observe.summary import Summary
from llamarl.types import RolloutGroup

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "agents.md"
SETTINGS = [
    "generator.threads=1",
    "trainer.threads=1",
    "schedule.groups_per_update=32",
    "schedule.updates=14",
    "generator.temperature=2.5",
    "generator.slots=64",
    "trainer.lr=5e-4",
    "evaluate.prompts=64",
    "evaluate.every=0",
    "snapshots.every=0",
]


class PermutedRewards:
    """Agents whose rewards are dealt out again among the samples of each training group."""

    def __init__(self, agents: Executor) -> None:
        self._agents, self._chance = agents, random.Random(0)

    @property
    def idle(self) -> bool:
        return self._agents.idle

    def handle(self, message: Message) -> Iterable[Report]:
        return [self._permuted(report) for report in self._agents.handle(message)]

    def work(self) -> Iterable[Report]:
        return [self._permuted(report) for report in self._agents.work()]

    def _permuted(self, report: Report) -> Report:
        if not isinstance(report, GroupResult) or report.group.kind != "train":
            return report
        group = report.group
        assert isinstance(group, RolloutGroup)
        rewards = list(group.rewards)
        self._chance.shuffle(rewards)
        rollouts = tuple(replace(one, reward=rewards[one.completion.sample or 0]) for one in group.rollouts)
        return GroupResult(RolloutGroup(group.prompt, rollouts))


def build_permuted(context: BuildContext) -> Executor:
    return PermutedRewards(build_agents(context))


def run(settings: list[str], builders: dict[str, Builder]) -> Summary:
    config = load_config(ROOT / "examples" / "agent_calculator.yaml", [*SETTINGS, *settings])
    config = replace(config, agent=replace(config.agent, run=str(ROOT / config.agent.run)))
    with tempfile.TemporaryDirectory() as folder:
        return Job(config, builders=builders).run(Path(folder) / "run")


def row(name: str, summary: Summary) -> str:
    counts = summary.agents if isinstance(summary.agents, dict) else {}
    sessions = counts.get("agent_sessions", 0)
    return (
        f"| {name} | {summary.eval_before:.3f} | {summary.eval_after:.3f} | {summary.reward_first:.3f} | "
        f"{summary.reward_last:.3f} | {sessions:,} | {counts.get('agent_calls', 0) / max(1, sessions):.2f} | "
        f"{counts.get('agent_failures', 0) + counts.get('agent_timeouts', 0)} | {sessions / summary.wall_s:.0f} |"
    )


def main() -> None:
    settings = sys.argv[1:]
    told = run(settings, {})
    permuted = run(settings, {"agent": build_permuted})
    command = " ".join(["python benchmarks/agents_learn.py", *settings])
    lines = [
        "# Training through the endpoint",
        "",
        f"`{command}`: the agent of examples/agent_calculator.yaml, through HTTP, on the model that ships with",
        "LlamaRL; sums up to 299, of which it knows few. Two cores, shared with other work. Rewards are means of the first",
        "and last tenth of the updates; held-out problems are answered greedily.",
        "",
        "| rewards | held-out before | after | reward at first | at last | sessions | calls each | failed | sessions/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        row("as the agent gave them", told),
        row("permuted within each group", permuted),
        "",
    ]
    RESULT.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
