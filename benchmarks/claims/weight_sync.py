"""Claim 4: what new weights cost in the run of claim 1: seconds that trainer and generator lost with every update.

    python benchmarks/claims/weight_sync.py [--runs FOLDER] [KEY=VALUE ...]

Must: under 2% of the update; hoped for: under 0.5%.
"""

from __future__ import annotations

import statistics

from arms import ASYNC, Figures, as_figures, keep, made, read_options
from plot import bars
from windows import steady

MUST, HOPED = 0.02, 0.005


def main() -> None:
    options = read_options(__doc__)
    record = made(ASYNC, options)
    window = steady(record)
    lost = {
        "trainer": [row["sync_trainer_s"] for row in record.updates.values() if "sync_trainer_s" in row]
        or [row["sync_trainer_s"] for row in record.transfers if "sync_trainer_s" in row],
        "generator": [row["sync_generator_s"] for row in record.transfers if "sync_generator_s" in row],
    }
    means = {role: statistics.mean(values[1:]) for role, values in lost.items()}  # the first are loaded at the start
    share = sum(means.values()) / window.update_s
    num_bytes = max(row["bytes"] for row in record.transfers)
    print(f"{num_bytes / 1e9:.2f} GB to the generator with every update of {window.update_s:.2f} s")
    for role, mean in means.items():
        print(f"{role:10} loses {1000 * mean:7.2f} ms, at most {1000 * max(lost[role][1:]):.2f}")
    print(f"together {share:.2%} of an update (must 2%, hoped for 0.5%)")
    figures = {
        "window": as_figures(window),
        "bytes": num_bytes,
        "lost_s": means,
        "share": share,
        "must": MUST,
        "hoped_for": HOPED,
        "met": share < MUST,
    }
    keep("weight_sync", options, figures, picture)


def picture(figures: Figures) -> str:
    values = {f"{role} loses": 1000 * mean for role, mean in figures["lost_s"].items()}
    return bars(f"New weights: {figures['share']:.2%} of an update", "ms an update", values, " ms")


if __name__ == "__main__":
    main()
