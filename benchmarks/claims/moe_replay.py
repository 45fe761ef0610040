"""Claim: RL on a mixture of experts is as stable with replayed routing as RL on a dense model, with answers that are up to
four versions old. Arithmetic with the shipped tiny models, S = 4, several seeds: replay on, replay off, and dense.

    python benchmarks/claims/moe_replay.py [--seeds 3] [--updates 60] [--runs FOLDER] [--experts MODEL] [KEY=VALUE ...]

It runs on a CPU in fp32 by default, where both sides choose the same experts for the same weights, so that only staleness is
left to replay; generator.dtype=bfloat16 trainer.dtype=bfloat16 adds rounding. Stable: no update is skipped, and the reward of
the last updates is not below the best that it was by more than the dense model's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LAST = 5  # updates whose mean reward is told
SETTINGS = ("schedule.max_staleness=4", "evaluate.every=20", "snapshots.at_end=none")
Row = dict[str, float]


def arms(experts: str) -> dict[str, tuple[str, ...]]:
    return {
        "replay": (f"model.path={experts}",),
        "own choice": (f"model.path={experts}", "trainer.replay_routes=false"),
        "dense": ("model.path=tiny",),
    }


def rows_of(run: Path, name: str) -> list[Row]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def made(run: Path, settings: Sequence[str]) -> Path:
    """The folder of a run, which is made unless it is there."""
    if not (run / "summary.json").exists():
        subprocess.run([sys.executable, "-m", "llamarl", "train", *settings, "--run", str(run)], check=True)
    return run


def figures(run: Path) -> Row:
    """Of one run."""
    rows = [row for row in rows_of(run, "metrics.jsonl") if "reward" in row]
    means = [
        statistics.fmean(row["reward"] for row in rows[max(0, end - LAST) : end]) for end in range(LAST, len(rows) + 1)
    ]
    accuracy = rows_of(run, "evaluations.jsonl")[-1]
    found = {
        "reward": means[-1],
        "behind_best": max(means) - means[-1],
        "skipped": sum(row.get("skipped", 0.0) for row in rows),
        "least_sample_size": min(row.get("effective_sample_size", 1.0) for row in rows),
        "accuracy": accuracy.get("accuracy", accuracy.get("reward", 0.0)),
    }
    for name in ("route_diff_share", "expert_load_max", "logprob_gap", "logprob_gap_own_routes", "kl_behavior"):
        if values := [row[name] for row in rows if name in row]:
            found[name] = statistics.fmean(values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=Path("runs/moe_replay"))
    parser.add_argument("--experts", default="tiny-moe", help="model with experts")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    found: dict[str, list[Row]] = {}
    for seed in range(args.seeds):
        for name, own in arms(args.experts).items():
            run = args.runs / f"{name.replace(' ', '_')}_{seed}"
            settings = [*SETTINGS, f"schedule.updates={args.updates}", f"seed={seed}", *own, *args.settings]
            found.setdefault(name, []).append(figures(made(run, settings)))
            told = ", ".join(f"{key} {value:.3g}" for key, value in found[name][-1].items())
            print(f"{name}, seed {seed}: {told}", flush=True)
    allowed = max(row["behind_best"] for row in found["dense"])
    for name, rows in found.items():
        stable = all(not row["skipped"] and row["behind_best"] <= max(0.02, allowed) for row in rows)
        reward = statistics.fmean(row["reward"] for row in rows)
        print(f"{name}: reward of the last {LAST} updates {reward:.3f}, {'stable' if stable else 'NOT stable'}")


if __name__ == "__main__":
    main()
