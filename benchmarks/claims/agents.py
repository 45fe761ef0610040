"""Claim 18: an agent through the endpoint, on a task that needs several turns: reward rises, and tokens are exact.

    python benchmarks/claims/agents.py [--runs FOLDER] [KEY=VALUE ...]       # some minutes on two cores; no GPU is needed

The agent of examples/agent_calculator.yaml asks the model over HTTP, runs the calculator if the model asks for it, and asks
again. It knows nothing of training. Tokens are exact if no call had a history that the endpoint had not served itself, and
if the trainer's log-probs of the sampled tokens are the generator's. benchmarks/agents_learn.py has the same with permuted
rewards, which teach nothing. Must: held-out reward +0.3; calls per session above 1; no unmatched call; log-probs within
0.01.
"""

from __future__ import annotations

from typing import Any

from arms import ROOT, Arm, Figures, Record, keep, made, read_options
from learns import smoothed_reward
from plot import lines

ARM = Arm(
    "agents",
    (
        f"agent.run={ROOT / 'examples' / 'agent_calculator.py'}:run",
        "generator.threads=1",
        "trainer.threads=1",
        "schedule.updates=14",
        "generator.temperature=2.5",
        "generator.slots=64",
        "trainer.lr=5e-4",
        "evaluate.every=0",
        "snapshots.every=0",
        "snapshots.at_end=none",
    ),
    ROOT / "examples" / "agent_calculator.yaml",
)
MUST, MUST_GAP = 0.3, 0.01


def read(record: Record) -> dict[str, Any]:
    summary = record.summary
    counts = summary["agents"]
    gaps = [row["logprob_gap"] for row in record.metrics.values() if "logprob_gap" in row]
    return {
        "before": summary["eval_before"],
        "after": summary["eval_after"],
        "reward": [summary["reward_first"], summary["reward_last"]],
        "sessions": counts["agent_sessions"],
        "calls_per_session": counts["agent_calls"] / max(1, counts["agent_sessions"]),
        "unmatched_calls": counts["agent_unmatched"],
        "failed": counts["agent_failures"] + counts["agent_timeouts"],
        "logprob_gap": max(gaps, default=None),
        "reward_over_updates": [
            (update, row["reward"]) for update, row in sorted(record.metrics.items()) if "reward" in row
        ],
        "reward_over_minutes": smoothed_reward(record),
    }


def main() -> None:
    options = read_options(__doc__)
    one = read(made(ARM, options))
    gap = "not measured" if one["logprob_gap"] is None else f"{one['logprob_gap']:.5f} at most"
    first, last = one["reward"]
    print(f"held-out reward {one['before']:.3f} -> {one['after']:.3f}; while training {first:.3f} -> {last:.3f}")
    print(f"{one['sessions']:,} sessions, {one['calls_per_session']:.2f} calls each, {one['failed']} failed")
    print(f"{one['unmatched_calls']} calls with another history; log-probs differ by {gap}")
    exact = one["unmatched_calls"] == 0 and one["logprob_gap"] is not None and one["logprob_gap"] < MUST_GAP
    met = exact and one["after"] - one["before"] >= MUST and one["calls_per_session"] > 1
    keep("agents", options, {**one, "exact": exact, "met": met}, picture)


def picture(figures: Figures) -> str:
    series = {"reward while training": figures["reward_over_updates"]}
    return lines("An agent with a calculator, through the endpoint", "updates", "mean reward", series)


if __name__ == "__main__":
    main()
