"""PPO with a critic learns as much as AIPO with group means, from the same number of samples. The arithmetic task on a CPU,
three seeds each.

    python benchmarks/claims/critic_learns.py [--runs FOLDER] [KEY=VALUE ...]

Six runs of examples/arithmetic.yaml, deterministic, on two cores; those that are there are not made again. Operands go up to
149, and the model has seen sums of operands up to 99 only: as in real data, some problems are out of reach, and a critic has
to tell which. On operands up to 99 alone, critics explained 0.2 to 0.35 in four tries of one seed (`task.max_operand=99` runs
that). A critic does not need several answers to a prompt, so it gets as many answers to different ones.
Must: held-out accuracy not below that of group means by more than a point, and explained variance above 0.5 at the end (of
the last ten updates, measured before the critic learns from a batch).
"""

from __future__ import annotations

import statistics
from typing import Any

from arms import ROOT, Arm, Figures, Record, keep, made_all, read_options
from plot import lines

SEEDS = (0, 1, 2)
LAST = 10  # updates
POINTS, EXPLAINED = 0.01, 0.5
COMMON = ("schedule.deterministic=true", "evaluate.every=0", "evaluate.prompts=512", "task.max_operand=149")
SINGLE = ("schedule.groups_per_update=768", "schedule.samples_per_group=1")
CRITIC = ("critic.lr=5e-4", "critic.epochs=2", "critic.minibatches=16", "critic.clip=0")
ARMS = {
    "AIPO, group means": (),
    "PPO, critic": ("algo.loss=ppo", "algo.advantage=gae", "algo.minibatches=4", *CRITIC, *SINGLE),
}
ARITHMETIC = ROOT / "examples" / "arithmetic.yaml"


def arm(name: str, seed: int) -> Arm:
    folder = "critic" if "critic" in name else "group-means"
    return Arm(f"critic/{folder}-{seed}", (*COMMON, *ARMS[name], f"seed={seed}"), ARITHMETIC)


def measured(records: list[Record]) -> dict[str, Any]:
    accuracies = [record.summary["eval_after"] for record in records]
    explained = [_last(record, "explained_variance") for record in records]
    return {
        "accuracy": statistics.mean(accuracies),
        "accuracies": accuracies,
        "deviation": statistics.stdev(accuracies),
        "before": statistics.mean(record.summary["eval_before"] for record in records),
        "explained": None if None in explained else explained,
        "value_loss": [_last(record, "value_loss") for record in records],
        "rewards": [[row["reward"] for _, row in sorted(record.metrics.items())] for record in records],
        "run_s": max(record.summary["wall_s"] for record in records),
    }


def _last(record: Record, name: str) -> float | None:
    """Mean of a metric over the last updates; None if there is none."""
    rows = [row for _, row in sorted(record.metrics.items())][-LAST:]
    found = [row[name] for row in rows if name in row]
    return statistics.mean(found) if found else None


def main() -> None:
    options = read_options(__doc__)
    records = made_all({(name, seed): arm(name, seed) for name in ARMS for seed in SEEDS}, options)
    table = {name: measured([records[name, seed] for seed in SEEDS]) for name in ARMS}
    for name, row in table.items():
        told = "" if row["explained"] is None else f"  explained variance {min(row['explained']):.2f} at least"
        print(f"{name:18} {row['before']:.3f} -> {row['accuracy']:.3f} +- {row['deviation']:.3f}{told}")
    means, critic = table.values()
    difference, explained = critic["accuracy"] - means["accuracy"], min(critic["explained"])
    met = difference >= -POINTS and explained > EXPLAINED
    print(f"{100 * difference:+.1f} points (must {-100 * POINTS:+.0f}), explained {explained:.2f} (must {EXPLAINED})")
    keep(
        "critic_learns", options, {"arms": table, "difference": difference, "explained": explained, "met": met}, picture
    )


def picture(figures: Figures) -> str:
    series = {
        name: [
            (float(update), statistics.mean(values)) for update, values in enumerate(zip(*row["rewards"], strict=True))
        ]
        for name, row in figures["arms"].items()
    }
    return lines("Arithmetic: PPO with a critic and AIPO", "updates", "reward (T = 1)", series)


if __name__ == "__main__":
    main()
