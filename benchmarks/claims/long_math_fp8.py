"""Claim 13: the long run of claim 12 with an fp8 generator, with and without AIPO: the curves, whatever they are.

    python benchmarks/claims/long_math_fp8.py [--at-most 1] [--updates 300] [KEY=VALUE ...]    # task.path=FOLDER is MATH here

Others report that fp8 rollouts collapse at long answers. The bf16 run of claim 12 is shared with it. Without AIPO, the loss
is plain REINFORCE. MATH-500 is answered by the fp8 generator of the job in these arms.
"""

from __future__ import annotations

from arms import MATH, Arm, Figures, keep, read_options
from long_math import ARM, SETTINGS, tell, trained
from plot import lines

ARMS = {
    "bf16, AIPO": ARM,
    "fp8, AIPO": Arm("long_math/fp8-aipo", (*SETTINGS, "generator.quantize=fp8"), MATH),
    "fp8, no correction": Arm(
        "long_math/fp8-reinforce", (*SETTINGS, "generator.quantize=fp8", "algo.loss=reinforce"), MATH
    ),
}


def main() -> None:
    options = read_options(__doc__)
    found = {}
    for name, arm in ARMS.items():
        found[name] = trained(arm, options)
        tell(name, found[name])
    keep("long_math_fp8", options, {"arms": found}, picture)


def picture(figures: Figures) -> str:
    series = {name: one["accuracy"] for name, one in figures["arms"].items()}
    return lines("MATH-500 over a long run, by generator and loss", "updates", "share right", series, tuple(series)[:1])


if __name__ == "__main__":
    main()
