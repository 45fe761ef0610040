"""Claim 17: shared-prompt training on and off: the same curve, and the time saved.

    python benchmarks/claims/shared_prompts_learn.py [--at-most 1] [KEY=VALUE ...]     # GSM8K with Qwen, on a GPU
    python benchmarks/claims/shared_prompts_learn.py --small [KEY=VALUE ...]           # sums with SmolLM2, on a CPU

Sync arms (S = 0), so that both train on the same prompts and, at first, on the same answers; times are compared, so one run
at a time. Must: rewards equal within noise, and the ratio of the times.
"""

from __future__ import annotations

from math import sqrt
from statistics import mean, stdev
from typing import Any

from arms import GSM8K, SMOLLM2, Arm, Figures, Record, keep, made_all, read_options
from plot import lines
from windows import steady

COMMON = (
    "placement=colocated",
    "schedule.max_staleness=0",
    "evaluate.every=0",
    "snapshots.at_end=none",
)


def arms(small: bool) -> dict[str, Arm]:
    name, updates, config = ("shared_prompts_small", 20, SMOLLM2) if small else ("shared_prompts", 60, GSM8K)
    common = (*COMMON, f"schedule.updates={updates}")
    return {how: Arm(f"{name}/{how}", (*common, f"trainer.share_prompts={how}"), config) for how in ("off", "on")}


def read(record: Record) -> dict[str, Any]:
    window = steady(record)
    rows = [record.updates[update] for update in range(window.first, window.last + 1)]
    return {
        "update_s": window.update_s,
        "trainer_s": mean(row["compute_s"] for row in rows) if all("compute_s" in row for row in rows) else None,
        "shared_tokens": mean(row.get("shared_tokens", 0.0) for row in rows),
        "reward": [row["reward"] for _, row in sorted(record.metrics.items()) if "reward" in row],
        "after": record.summary["eval_after"],
        "logprob_gap": record.mean("logprob_gap"),
    }


def main() -> None:
    options = read_options(__doc__, small="sums after three solved ones, with SmolLM2")
    found = {how: read(record) for how, record in made_all(arms(options.small), options).items()}
    pairs = [on - off for on, off in zip(found["on"]["reward"], found["off"]["reward"], strict=True)]
    error = stdev(pairs) / sqrt(len(pairs))
    ratio = found["off"]["update_s"] / found["on"]["update_s"]
    for how, one in found.items():
        print(
            f"{how:4} {one['update_s']:.2f} s an update, {one['shared_tokens']:,.0f} shared tokens, {one['after']:.1%}"
        )
    print(f"reward on - off {mean(pairs):+.4f} +- {2 * error:.4f}; {ratio:.2f} times as fast")
    same = abs(mean(pairs)) <= max(2 * error, 0.01)
    applied = found["on"]["shared_tokens"] > 0 == found["off"]["shared_tokens"]
    print(
        f"applied: {'yes' if applied else 'NO: no tokens were shared'}; equal within noise: {'yes' if same else 'NO'}"
    )
    task = "SmolLM2-135M on sums" if options.small else "Qwen2.5-Coder-1.5B on GSM8K"
    figures = {
        **found,
        "task": task,
        "ratio": ratio,
        "difference": mean(pairs),
        "error": error,
        "met": same and applied,
    }
    keep("shared_prompts_learn", options, figures, picture)


def picture(figures: Figures) -> str:
    series = {f"share_prompts={how}": list(enumerate(figures[how]["reward"])) for how in ("off", "on")}
    return lines(f"{figures['task']}, prompts shared or not", "updates", "mean reward", series)


if __name__ == "__main__":
    main()
