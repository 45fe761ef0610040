"""Claim 13: the long run of claim 12 with an fp8 generator, with and without AIPO: the curves, whatever they are.

    python benchmarks/claims/long_math_fp8.py [--at-most 1] [--updates 300] [KEY=VALUE ...]    # task.path=FOLDER is MATH here
    python benchmarks/claims/long_math_fp8.py --small [KEY=VALUE ...]                          # arithmetic, on a CPU

Others report that fp8 rollouts collapse at long answers. The run of claim 12, without fp8, is shared with it. Without AIPO,
the loss is plain REINFORCE. Evaluations are answered by the generator of the job, in fp8 where training has it.
"""

from __future__ import annotations

from arms import Figures, keep, read_options
from long_math import SMALL_TASK, arm, tell, trained
from plot import lines

ARMS = {
    "not quantized, AIPO": ("plain-aipo",),
    "fp8, AIPO": ("fp8-aipo", "generator.quantize=fp8"),
    "fp8, no correction": ("fp8-reinforce", "generator.quantize=fp8", "algo.loss=reinforce"),
}


def main() -> None:
    options = read_options(__doc__, small=SMALL_TASK)
    found = {}
    for name, (folder, *settings) in ARMS.items():
        found[name] = trained(arm(folder, options.small, *settings), options)
        tell(name, found[name])
    task = SMALL_TASK if options.small else "MATH-500, Qwen2.5-Coder-1.5B, S = 8"
    keep("long_math_fp8", options, {"task": task, "arms": found}, picture)


def picture(figures: Figures) -> str:
    series = {name: one["accuracy"] for name, one in figures["arms"].items()}
    return lines(f"{figures['task']}, by generator and loss", "updates", "share right", series, tuple(series)[:1])


if __name__ == "__main__":
    main()
