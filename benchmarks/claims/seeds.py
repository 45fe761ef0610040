"""Claim 14: three seeds of claim 1, and of sync at equal samples: mean and standard deviation of the accuracy.

    python benchmarks/claims/seeds.py [--beside 2] [--at-most N] [KEY=VALUE ...]  # GSM8K with Qwen, on a GPU
    python benchmarks/claims/seeds.py --small [KEY=VALUE ...]                     # arithmetic with the tiny model, on a CPU

Async is claim 1's job (S = 2), whose own run is the first seed; sync has S = 0 and both roles in turn, the same updates,
prompts and answers. Learning is compared, not time. The interval of async - sync is that of Welch's t, over seeds: it
includes what two runs of the same setting differ by.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from arms import ARITHMETIC, ASYNC, SMALL, Arm, Figures, Record, keep, made_all, read_options
from plot import lines

SEEDS = (0, 1, 2)
SYNC = ("placement=colocated", "schedule.max_staleness=0")
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}  # two-sided, by degrees of freedom


def arms(small: bool) -> dict[tuple[str, int], Arm]:
    """By kind and seed. Nothing reads a last snapshot, but that of claim 1's own run."""
    found: dict[tuple[str, int], Arm] = {}
    for kind, settings in (("async", ()), ("sync", SYNC)):
        for seed in SEEDS:
            own = (*settings, f"seed={seed}", "snapshots.at_end=none")
            if small:
                found[kind, seed] = Arm(f"seeds_small/{kind}-{seed}", (*SMALL, "evaluate.every=25", *own), ARITHMETIC)
            else:
                found[kind, seed] = ASYNC if (kind, seed) == ("async", 0) else Arm(f"seeds/{kind}-{seed}", own)
    return found


def read(record: Record) -> dict[str, Any]:
    points = sorted(record.accuracy.items())
    return {"accuracy": points, "staleness": record.summary["staleness_mean"], "updates": record.summary["updates"]}


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over seeds, for every version that was evaluated in all of them."""
    tables = [dict(run["accuracy"]) for run in runs]
    versions = sorted(set.intersection(*(set(table) for table in tables)))
    values = {version: [table[version] for table in tables] for version in versions}
    return {
        "versions": versions,
        "mean": [mean(values[version]) for version in versions],
        "deviation": [stdev(values[version]) for version in versions],
        "last": values[versions[-1]],
        "staleness": mean(run["staleness"] for run in runs),
    }


def difference(first: list[float], second: list[float]) -> tuple[float, float]:
    """Mean difference of two samples, and half of its 95% interval by Welch's t."""
    parts = [stdev(values) ** 2 / len(values) for values in (first, second)]
    if not sum(parts):
        return mean(first) - mean(second), 0.0
    squares = (part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    freedom = sum(parts) ** 2 / sum(squares)
    return mean(first) - mean(second), T_95[max(1, min(4, int(freedom)))] * sum(parts) ** 0.5


def main() -> None:
    options = read_options(__doc__, small="arithmetic with the tiny model, S = 1 and 0")
    runs = {key: read(record) for key, record in made_all(arms(options.small), options).items()}
    found = {kind: summed_up([run for (name, _), run in runs.items() if name == kind]) for kind in ("async", "sync")}
    for kind, one in found.items():
        print(f"{kind} (realized staleness {one['staleness']:.2f}), {len(SEEDS)} seeds")
        for version, average, deviation in zip(one["versions"], one["mean"], one["deviation"], strict=True):
            print(f"  {version:5} updates  {average:.1%} +- {100 * deviation:.1f} points")
    gap, half = difference(found["async"]["last"], found["sync"]["last"])
    print(f"async - sync {100 * gap:+.1f} points, 95% {100 * (gap - half):+.1f} to {100 * (gap + half):+.1f}")
    task = "arithmetic, tiny model" if options.small else "GSM8K, Qwen2.5-Coder-1.5B"
    figures = {"task": task, "seeds": SEEDS, **found, "difference": gap, "interval": [gap - half, gap + half]}
    keep("seeds", options, figures, picture)


def picture(figures: Figures) -> str:
    series = {
        f"{kind}, {name}": [
            (version, average + sign * deviation)
            for version, average, deviation in zip(one["versions"], one["mean"], one["deviation"], strict=True)
        ]
        for kind, one in ((kind, figures[kind]) for kind in ("async", "sync"))
        for name, sign in (("mean", 0), ("mean + deviation", 1), ("mean - deviation", -1))
    }
    dotted = [name for name in series if name.endswith("mean")]
    return lines(f"Three seeds each: {figures['task']}", "updates", "share right", series, dotted)


if __name__ == "__main__":
    main()
