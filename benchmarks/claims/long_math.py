"""Claim 12: a long run. Qwen on MATH, answers up to 4,096 tokens, S = 8, 300 updates in stages: accuracy on MATH-500,
effective samples, clipped share and log-prob gap over the updates.

    python benchmarks/claims/long_math.py [--at-most 1] [--updates 300] [KEY=VALUE ...]    # task.path=FOLDER is MATH here
    python benchmarks/claims/long_math.py --small [KEY=VALUE ...]                          # arithmetic, on a CPU

The run is examples/math_qwen.yaml at a constant learning rate, in stages of 100 updates: `--at-most 1` makes one a command,
and `--updates 100` ends with the figures of the first, from where 200 and 300 go on. Must: no collapse, and +5 points on
MATH-500.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from arms import (
    ARITHMETIC,
    MATH,
    SMALL,
    Arm,
    Figures,
    Options,
    Record,
    keep,
    made_in_stages,
    over_updates,
    read_options,
)
from plot import lines

UPDATES, STAGE, MUST = 300, 100, 0.05
SETTINGS = ("trainer.final_lr_share=1", "evaluate.every=50", "schedule.probe_every=5")
STALE = (*SMALL, "schedule.max_staleness=8", "snapshots.at_end=whole", *SETTINGS)  # stages go on from snapshots
SMALL_TASK = "arithmetic with the tiny model, S = 8"
METRICS = ("effective_sample_size", "clipped_share", "logprob_gap", "kl_behavior", "entropy", "reward", "answer_tokens")
COLLAPSED = 0.5  # share of the best accuracy so far, or of the first effective samples, below which learning collapsed


def arm(name: str, small: bool, *settings: str) -> Arm:
    if small:
        return Arm(f"long_small/{name}", (*STALE, *settings), ARITHMETIC)
    return Arm(f"long_math/{name}", (*SETTINGS, *settings), MATH)


def trained(arm: Arm, options: Options) -> dict[str, Any]:
    """A small run is short, and deterministic: one stage, since such a run cannot be made longer after its end."""
    updates = options.updates or UPDATES
    return read(made_in_stages(arm, updates, options.stage or (updates if options.small else STAGE), options))


def read(record: Record) -> dict[str, Any]:
    accuracy = sorted(record.accuracy.items())
    every = max(1, record.summary["updates"] // 30)
    series = {name: over_updates(record, name, every) for name in METRICS}
    values = [value for _, value in accuracy]
    fell = any(value < COLLAPSED * best for value, best in zip(values, accumulate(values, max), strict=True))
    effective = [value for _, value in series["effective_sample_size"]]
    return {
        "updates": record.summary["updates"],
        "accuracy": accuracy,
        "gain": values[-1] - values[0],
        "staleness": record.summary["staleness_mean"],
        "collapsed": fell or (bool(effective) and min(effective) < COLLAPSED * effective[0]),
        "series": series,
    }


def tell(name: str, one: Figures) -> None:
    print(f"{name}: {one['updates']} updates, mean staleness {one['staleness']:.1f}, collapsed: {one['collapsed']}")
    print("  updates  accuracy")
    for version, accuracy in one["accuracy"]:
        print(f"  {version:7}  {accuracy:.1%}")
    for metric, points in one["series"].items():
        if points:
            print(f"  {metric:22} {points[0][1]:10.4f} -> {points[-1][1]:.4f}, at most {max(v for _, v in points):.4f}")


def main() -> None:
    options = read_options(__doc__, small=SMALL_TASK)
    one = trained(arm("plain-aipo", options.small), options)
    tell("AIPO", one)
    print(f"gain {100 * one['gain']:+.1f} points (must +5)")
    met = one["gain"] >= MUST and not one["collapsed"]
    task = SMALL_TASK if options.small else "Qwen2.5-Coder-1.5B on MATH, S = 8"
    keep("long_math", options, {"task": task, **one, "must": MUST, "met": met}, picture)


def picture(figures: Figures) -> str:
    series = {"accuracy, greedy": figures["accuracy"], "effective samples": figures["series"]["effective_sample_size"]}
    shown = {name: points for name, points in series.items() if points}
    return lines(figures["task"], "updates", "share", shown, tuple(shown)[:1])


if __name__ == "__main__":
    main()
