"""Claim 8: what the correction for being off-policy is worth. The arithmetic task on a CPU, at staleness exactly 0, 1, 4 and
8 (deterministic mode), with AIPO, without any correction (REINFORCE) and with PPO's two-sided clip, three seeds each.

    python benchmarks/claims/aipo_matters.py [--runs FOLDER] [KEY=VALUE ...]

36 runs of at most a minute each on two cores; those that are there are not made again.
"""

from __future__ import annotations

import statistics
from typing import Any

from arms import ARITHMETIC, SMALL, Arm, Figures, Record, keep, made, read_options
from plot import lines

LOSSES = {"AIPO": "aipo", "no correction": "reinforce", "two-sided clip": "ppo"}
STALENESS = (0, 1, 4, 8)
SEEDS = (0, 1, 2)


def arm(loss: str, staleness: int, seed: int) -> Arm:
    settings = (*SMALL, f"algo.loss={loss}", f"schedule.max_staleness={staleness}", f"seed={seed}")
    return Arm(f"aipo/{loss}-S{staleness}-{seed}", settings, ARITHMETIC)


def measured(records: list[Record]) -> dict[str, Any]:
    accuracies = [record.summary["eval_after"] for record in records]
    return {
        "accuracy": statistics.mean(accuracies),
        "deviation": statistics.stdev(accuracies),
        "accuracies": accuracies,
        "before": statistics.mean(record.summary["eval_before"] for record in records),
        "staleness": statistics.mean(record.summary["staleness_mean"] for record in records),
        "staleness_max": max(record.summary["staleness_max"] for record in records),
        "effective_sample_size": _mean(records, "effective_sample_size"),
        "clipped_share": _mean(records, "clipped_share"),
        "run_s": max(record.summary["wall_s"] for record in records),
    }


def _mean(records: list[Record], name: str) -> float:
    return float(statistics.mean(row.get(name, 0.0) for record in records for row in record.metrics.values()))


def main() -> None:
    options = read_options(__doc__)
    table: dict[str, dict[int, dict[str, Any]]] = {}
    print("loss            S  staleness  accuracy after       effective samples  clipped")
    for name, loss in LOSSES.items():
        for staleness in STALENESS:
            row = measured([made(arm(loss, staleness, seed), options) for seed in SEEDS])
            table.setdefault(name, {})[staleness] = row
            accuracy = f"{row['accuracy']:.3f} +- {row['deviation']:.3f}"
            shares = f"{row['effective_sample_size']:17.3f}  {row['clipped_share']:7.2%}"
            print(f"{name:14} {staleness:2}  {row['staleness']:9.2f}  {accuracy:19}  {shares}", flush=True)
    keep("aipo_matters", options, {"arms": table}, picture)


def picture(figures: Figures) -> str:
    series = {
        name: [(float(staleness), row["accuracy"]) for staleness, row in rows.items()]
        for name, rows in figures["arms"].items()
    }
    return lines("Held-out accuracy after 50 updates", "staleness, updates", "accuracy", series)


if __name__ == "__main__":
    main()
