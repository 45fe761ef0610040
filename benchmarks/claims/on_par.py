"""Claim 5: asynchronous training learns as much as synchronous. Qwen on GSM8K with S = 0, 1 and 4, the same updates and
samples, two seeds each; all test problems of GSM8K and MATH-500 before and after.

    python benchmarks/claims/on_par.py --math FOLDER [--beside 2] [--at-most N] [KEY=VALUE ...]

Differences are paired problem by problem, and their 95% interval is by resampling problems. Must: the lower end of async -
sync above -3 points; hoped for: above -1.5. Learning is compared, not time: two runs at a time fit on a GPU with 140 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from arms import Arm, Figures, Options, keep, made, read_options, side_by_side
from asking import QWEN, right_in_gsm8k, right_in_math
from plot import lines

from llamarl.tasks.statistics import bootstrap

STALENESS, SEEDS, UPDATES = (0, 1, 4), (0, 1), 25
MUST = -0.03
# Explicit sizes, since several jobs share a GPU: a trainer of about 50 GB, and a cache that holds answers of mean length.
SMALL = ("trainer.tokens_per_pack=4096", "snapshots.at_end=policy")
NO_EVALUATION = ("evaluate.prompts=0", "evaluate.every=0", f"schedule.updates={UPDATES}")
PAGES_PER_ANSWER = 26  # 416 tokens: answers have about 310, and a share of their prompt

Asked = dict[str, list[bool]]  # by task, problem by problem


def arm(staleness: int, seed: int) -> Arm:
    """Slots for all that may be under way, so that staleness is what it says."""
    place, slots = ("placement=colocated",) if staleness == 0 else (), (staleness + 1) * 256
    room = (f"generator.slots={slots}", f"generator.kv_pages={slots * PAGES_PER_ANSWER}")
    under_way = (f"schedule.max_staleness={staleness}", f"seed={seed}")
    return Arm(f"on_par/S{staleness}-{seed}", (*NO_EVALUATION, *SMALL, *under_way, *room, *place))


def asked(name: str, model: str, options: Options) -> Asked:
    return {
        "GSM8K": right_in_gsm8k(f"on_par/{name}", model, options),
        "MATH-500": right_in_math(f"on_par/{name}", model, options),
    }


def trained(staleness: int, seed: int, options: Options) -> tuple[float, Asked]:
    """Realised staleness, and what it got right afterwards."""
    record = made(arm(staleness, seed), options)
    policy = str(record.folder / record.summary["policy"])
    return record.summary["staleness_mean"], asked(f"S{staleness}-{seed}", policy, options)


def compared(results: dict[int, list[list[bool]]], staleness: int) -> dict[str, Any]:
    """Against S = 0, over the same problems; seeds are averaged first."""
    mine, theirs = (np.mean(np.array(results[number], dtype=float), axis=0) for number in (staleness, 0))
    low, high = bootstrap((mine - theirs).tolist())
    return {"difference": float((mine - theirs).mean()), "interval": [low, high], "met": low > MUST}


def figures_of(before: list[bool], results: dict[int, list[list[bool]]]) -> dict[str, Any]:
    after = {number: [float(np.mean(found)) for found in seeds] for number, seeds in results.items()}
    against = {number: compared(results, number) for number in STALENESS[1:]}
    return {"before": float(np.mean(before)), "after": after, "against_sync": against}


def tell(task: str, figures: dict[str, Any], stale: dict[int, list[float]]) -> None:
    print(f"{task}: before {figures['before']:.1%}")
    for number in STALENESS:
        after = ", ".join(f"{share:.1%}" for share in figures["after"][number])
        line = f"  S = {number} (realized {np.mean(stale[number]):.2f}): {after}"
        if number:
            found = figures["against_sync"][number]
            low, high = found["interval"]
            line += f"; against S = 0 {found['difference']:+.1%}, 95% {low:+.1%} to {high:+.1%} (must > -3%)"
        print(line)


def main() -> None:
    options = read_options(__doc__)
    pairs = [(staleness, seed) for seed in SEEDS for staleness in STALENESS]
    first = partial(asked, "before", options.chosen("model.path", QWEN), options)
    chains: list[Callable[[], tuple[float, Asked]]] = [lambda: (0.0, first())]
    chains += [partial(trained, *pair, options) for pair in pairs]
    (_, before), *after = side_by_side(chains, options)
    stale: dict[int, list[float]] = {number: [] for number in STALENESS}
    results: dict[str, dict[int, list[list[bool]]]] = {task: {number: [] for number in STALENESS} for task in before}
    for (staleness, _), (realized, found) in zip(pairs, after, strict=True):
        stale[staleness].append(realized)
        for task in before:
            results[task][staleness].append(found[task])
    figures = {task: figures_of(before[task], results[task]) for task in before}
    for task in before:
        tell(task, figures[task], stale)
    keep("on_par", options, {"updates": UPDATES, "staleness": stale, **figures}, picture)


def picture(figures: Figures) -> str:
    tasks = {task: found["after"] for task, found in figures.items() if isinstance(found, dict) and "after" in found}
    points = {
        task: [(float(number), float(np.mean(shares))) for number, shares in after.items()]
        for task, after in tasks.items()
    }
    title = f"Accuracy after {figures['updates']} updates"
    return lines(title, "max_staleness", "share right", points, tuple(points))


if __name__ == "__main__":
    main()
