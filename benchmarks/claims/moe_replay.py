"""Claim: RL on a mixture of experts is as stable with replayed routing as RL on a dense model, with answers that are up to
four versions old. Arithmetic with the shipped tiny models, S = 4, three seeds: replay on, replay off, and dense.

    python benchmarks/claims/moe_replay.py [--seeds 3] [--runs FOLDER] [--experts MODEL] [KEY=VALUE ...]

60 updates each; with schedule.deterministic=true all answers are four versions old, whatever else the machine does. It runs
on a CPU in fp32 by default, where both sides choose the same experts for the same weights, so that only staleness is left to
replay; generator.dtype=bfloat16 trainer.dtype=bfloat16 adds rounding. Stable: no update is skipped, and the reward of the
last updates is not below the best that it was by more than the dense model's.
"""

from __future__ import annotations

import statistics
from typing import Any

from arms import ROOT, Arm, Figures, Record, claim_parser, keep, made_all, options_of
from plot import lines

LAST = 5  # updates whose mean reward is told
LEAST = 0.02  # behind the best by so much is stable, whatever the dense model is
SETTINGS = ("schedule.updates=60", "schedule.max_staleness=4", "evaluate.every=20", "snapshots.at_end=none")
MEANS = ("route_diff_share", "expert_load_max", "logprob_gap", "logprob_gap_own_routes", "kl_behavior")


def arm(name: str, seed: int) -> Arm:
    own = ("trainer.replay_routes=false",) if name == "own choice" else ()
    settings = (*SETTINGS, *own, f"seed={seed}")
    return Arm(f"moe_replay/{name.replace(' ', '_')}_{seed}", settings, ROOT / "examples" / "arithmetic.yaml")


def read(record: Record) -> dict[str, Any]:
    """What one run came to."""
    rows = [row for _, row in sorted(record.metrics.items()) if "reward" in row]
    ends = range(min(LAST, len(rows)), len(rows) + 1)
    means = [statistics.fmean(row["reward"] for row in rows[max(0, end - LAST) : end]) for end in ends]
    found = {
        "reward": means[-1],
        "behind_best": max(means) - means[-1],
        "skipped": sum(row.get("skipped", 0.0) for row in rows),
        "least_sample_size": min(row.get("effective_sample_size", 1.0) for row in rows),
        "accuracy": record.summary["eval_after"],
    }
    found |= {name: record.mean(name) for name in MEANS if any(name in row for row in rows)}
    return {**found, "rewards": [row["reward"] for row in rows]}


def main() -> None:
    parser = claim_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--experts", default="tiny-moe", help="model with experts")
    args = parser.parse_intermixed_args()
    options = options_of(args)
    models = {"replay": args.experts, "own choice": args.experts, "dense": options.chosen("model.path", "tiny")}
    options.settings = tuple(one for one in options.settings if not one.startswith("model.path="))
    arms = {(name, seed): arm(name, seed).beginning_with(models[name]) for seed in range(args.seeds) for name in models}
    runs = {key: read(record) for key, record in made_all(arms, options).items()}
    for (name, seed), run in runs.items():
        told = ", ".join(f"{key} {value:.3g}" for key, value in run.items() if key != "rewards")
        print(f"{name}, seed {seed}: {told}")
    table = {name: [run for (of, _), run in runs.items() if of == name] for name in models}
    allowed = max(LEAST, *(run["behind_best"] for run in table["dense"]))
    stable = {
        name: all(not run["skipped"] and run["behind_best"] <= allowed for run in found)
        for name, found in table.items()
    }
    for name, found in table.items():
        reward = statistics.fmean(run["reward"] for run in found)
        print(f"{name}: reward of the last {LAST} updates {reward:.3f}, {'stable' if stable[name] else 'NOT stable'}")
    keep("moe_replay", options, {"arms": table, "stable": stable, "met": stable["replay"]}, picture)


def picture(figures: Figures) -> str:
    series = {
        name: [
            (float(update), statistics.fmean(values))
            for update, values in enumerate(zip(*(run["rewards"] for run in found), strict=True))
        ]
        for name, found in figures["arms"].items()
    }
    return lines("Arithmetic, four updates stale: experts and a dense model", "updates", "reward (T = 1)", series)


if __name__ == "__main__":
    main()
