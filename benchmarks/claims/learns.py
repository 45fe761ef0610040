"""Claim 1: RL works. Qwen2.5-Coder-1.5B-Instruct on GSM8K: accuracy on all 1,319 test problems, before and after.

    python benchmarks/claims/learns.py [--runs FOLDER] [KEY=VALUE ...]      # e.g. task.path=FOLDER_WITH_THE_DATA

The run is examples/gsm8k_qwen.yaml as it stands. Must: +6 points in 7 minutes of training; hoped for: +10.
"""

from __future__ import annotations

import math

from arms import ASYNC, Figures, Record, keep, made, read_options
from plot import lines

MUST, HOPED, MINUTES = 0.06, 0.10, 7.0
SMOOTHED = 10  # updates


def main() -> None:
    options = read_options(__doc__)
    record = made(ASYNC, options)
    points = [(record.minutes(version), accuracy) for version, accuracy in sorted(record.accuracy.items())]
    before, after, minutes = points[0][1], points[-1][1], points[-1][0]
    print("minutes  test accuracy")
    for at, accuracy in points:
        print(f"{at:7.1f}  {accuracy:.1%}")
    print(f"gain {100 * (after - before):+.1f} points in {minutes:.1f} minutes (must +6 in 7, hoped for +10)")
    figures = {
        "accuracy": points,
        "gain": after - before,
        "standard_error": _standard_error(before, after),
        "training_minutes": minutes,
        "must": MUST,
        "hoped_for": HOPED,
        "met": after - before >= MUST and minutes <= MINUTES,
        "reward": smoothed_reward(record),
        "summary": record.summary,
    }
    keep("learns", options, figures, picture)


def picture(figures: Figures) -> str:
    series = {"test accuracy, greedy": figures["accuracy"], "reward while training (T = 1)": figures["reward"]}
    return lines("Qwen2.5-Coder-1.5B on GSM8K", "minutes of training", "share right", series, tuple(series)[:1])


def smoothed_reward(record: Record) -> list[tuple[float, float]]:
    rewards = [(update, row["reward"]) for update, row in sorted(record.metrics.items()) if "reward" in row]
    found = []
    for end in range(SMOOTHED, len(rewards) + 1, SMOOTHED):
        recent = rewards[end - SMOOTHED : end]
        found.append((record.minutes(recent[-1][0] + 1), sum(reward for _, reward in recent) / SMOOTHED))
    return found


def _standard_error(before: float, after: float, problems: int = 1319) -> float:
    """Of the gain, as if the two evaluations were independent: an upper bound, since the problems are the same."""
    return math.sqrt((before * (1 - before) + after * (1 - after)) / problems)


if __name__ == "__main__":
    main()
