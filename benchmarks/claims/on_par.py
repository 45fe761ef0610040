"""Claim 5: asynchronous training learns as much as synchronous. Qwen on GSM8K with S = 0, 1 and 4, the same updates and
samples, two seeds each; all test problems of GSM8K and MATH-500 before and after.

    python benchmarks/claims/on_par.py --math FOLDER [--at-most 1] [KEY=VALUE ...]

Differences are paired problem by problem, and their 95% interval is by resampling problems. Must: the lower end of async -
sync above -3 points; hoped for: above -1.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from arms import GSM8K, MATH, Arm, Options, keep, made, read_options
from asking import right
from plot import lines

from llamarl.tasks.statistics import bootstrap

STALENESS, SEEDS, UPDATES = (0, 1, 4), (0, 1), 100
MUST, HOPED = -0.03, -0.015
NO_EVALUATION = ("evaluate.prompts=0", "evaluate.every=0", f"schedule.updates={UPDATES}")


def arm(staleness: int, seed: int) -> Arm:
    """Slots for all that may be under way, so that staleness is what it says."""
    place = ("placement=colocated",) if staleness == 0 else ()
    under_way = (f"schedule.max_staleness={staleness}", f"generator.slots={(staleness + 1) * 256}", f"seed={seed}")
    return Arm(f"on_par/S{staleness}-{seed}", (*NO_EVALUATION, *under_way, *place))


def asked(name: str, model: str, options: Options) -> dict[str, list[bool]]:
    math = [*(one for one in options.settings if not one.startswith("task.path=")), f"task.path={options.math}"]
    tasks = {"GSM8K": (GSM8K, list(options.settings)), "MATH-500": (MATH, ["generator.max_new_tokens=1024", *math])}
    return {
        task: right(f"on_par/{name}.{task}", model, config, settings, options)
        for task, (config, settings) in tasks.items()
    }


def model_folder(options: Options) -> str:
    chosen = [one.partition("=")[2] for one in options.settings if one.startswith("model.path=")]
    return chosen[-1] if chosen else "models/qwen2.5-coder-1.5b"


def compared(results: dict[int, list[list[bool]]], staleness: int) -> dict[str, Any]:
    """Against S = 0, over the same problems; seeds are averaged first."""
    mine, theirs = (np.mean(np.array(results[number], dtype=float), axis=0) for number in (staleness, 0))
    low, high = bootstrap((mine - theirs).tolist())
    return {"difference": float((mine - theirs).mean()), "interval": [low, high], "met": low > MUST}


def main() -> None:
    options = read_options(__doc__)
    before = asked("before", model_folder(options), options)
    results: dict[str, dict[int, list[list[bool]]]] = {task: {} for task in before}
    stale: dict[int, list[float]] = {}
    for staleness in STALENESS:
        for seed in SEEDS:
            record = made(arm(staleness, seed), options)
            stale.setdefault(staleness, []).append(record.summary["staleness_mean"])
            policy = str(record.folder / record.summary["policy"])
            for task, found in asked(f"S{staleness}-{seed}", policy, options).items():
                results[task].setdefault(staleness, []).append(found)
    figures: dict[str, Any] = {"staleness": stale}
    for task, by_staleness in results.items():
        shares = {number: [float(np.mean(found)) for found in seeds] for number, seeds in by_staleness.items()}
        against = {number: compared(by_staleness, number) for number in STALENESS[1:]}
        figures[task] = {"before": float(np.mean(before[task])), "after": shares, "against_sync": against}
        print(f"{task}: before {np.mean(before[task]):.1%}")
        for number in STALENESS:
            after = ", ".join(f"{share:.1%}" for share in shares[number])
            line = f"  S = {number} (realised {np.mean(stale[number]):.2f}): {after}"
            if number:
                low, high = against[number]["interval"]
                line += (
                    f"; against S = 0 {against[number]['difference']:+.1%}, 95% {low:+.1%} to {high:+.1%} (must > -3%)"
                )
            print(line)
    series = {
        task: [(float(number), float(np.mean(figures[task]["after"][number]))) for number in STALENESS]
        for task in results
    }
    keep(
        "on_par",
        options,
        figures,
        lines("Accuracy after 100 updates", "max_staleness", "share right", series, tuple(series)),
    )


if __name__ == "__main__":
    main()
