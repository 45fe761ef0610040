"""Claim 9: a quantized generator learns as well with AIPO, and what it does without. Qwen on GSM8K, the generator in bf16,
fp8 and int8 with AIPO, and fp8 and int8 without any correction (REINFORCE); the same updates and samples.

    python benchmarks/claims/quantized.py [--beside 2] [--at-most N] [KEY=VALUE ...]

The bf16 arm is a run of claim 5 (on_par.py) and is shared with it. All test problems are asked in bf16 after training, so
that what was learned is compared and not how it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import on_par
from arms import Arm, Figures, Options, keep, made, read_options, side_by_side
from asking import QWEN, right_in_gsm8k
from plot import bars

from llamarl.tasks.statistics import bootstrap

BASE = on_par.arm(staleness=1, seed=0)
LOSSES = {"AIPO": "aipo", "no correction": "reinforce"}
FIRST = "bf16, AIPO"


def arms() -> dict[str, Arm]:
    found = {FIRST: BASE}
    for name, loss in LOSSES.items():
        for kind in ("fp8", "int8"):
            settings = (*BASE.settings, f"generator.quantize={kind}", f"algo.loss={loss}")
            found[f"{kind}, {name}"] = Arm(f"quantized/{kind}-{loss}", settings)
    return found


def trained(arm: Arm, options: Options) -> tuple[dict[str, Any], list[bool]]:
    record = made(arm, options)
    found = right_in_gsm8k(arm.name, str(record.folder / record.summary["policy"]), options)
    figures = {
        "accuracy": float(np.mean(found)),
        "reward_last": record.summary["reward_last"],
        "logprob_gap": record.metrics[0].get("logprob_gap"),  # of the whole first batch, before anything was learned
        "effective_sample_size": record.mean("effective_sample_size"),
        "kl_behavior": record.mean("kl_behavior"),
        "clipped_share": record.mean("clipped_share"),
    }
    return figures, found


def tell(name: str, row: dict[str, Any]) -> None:
    low, high = row["interval"]
    against = "" if name == FIRST else f"  {row['difference']:+.1%} ({low:+.1%} to {high:+.1%})"
    gap = "-" if row["logprob_gap"] is None else f"{row['logprob_gap']:.4f}"
    print(f"{name:20} {row['accuracy']:8.1%}  {gap:>8}  {row['effective_sample_size']:9.4f}{against}")


def main() -> None:
    options = read_options(__doc__)
    asked = partial(right_in_gsm8k, "on_par/before", options.chosen("model.path", QWEN), options)
    chains: list[Callable[[], tuple[dict[str, Any], list[bool]]]] = [lambda: ({}, asked())]
    chains += [partial(trained, arm, options) for arm in arms().values()]
    (_, before), *after = side_by_side(chains, options)
    table = dict(zip(arms(), after, strict=True))
    first = np.array(table[FIRST][1], dtype=float)
    print(f"before: {np.mean(before):.1%}")
    print(f"{'generator, loss':20} accuracy       gap  effective  against bf16 with AIPO (95%)")
    for name, (row, right) in table.items():
        paired = np.array(right, dtype=float) - first
        row |= {"difference": float(paired.mean()), "interval": list(bootstrap(paired.tolist()))}
        tell(name, row)
    rows = {name: row for name, (row, _) in table.items()}
    keep("quantized", options, {"updates": on_par.UPDATES, "before": float(np.mean(before)), "arms": rows}, picture)


def picture(figures: Figures) -> str:
    shares = {"before": figures["before"], **{name: row["accuracy"] for name, row in figures["arms"].items()}}
    title = f"GSM8K after {figures['updates']} updates, by the generator's precision"
    return bars(title, "% right", {name: 100 * share for name, share in shares.items()}, "%")


if __name__ == "__main__":
    main()
