"""Ranks of large worlds, built on fake tensors, against the planner's formula: writes results/large_worlds.md.

    python benchmarks/large_worlds.py

Needs no GPU. Each row is what `llamarl plan --model M --gpus N --gpu h100 --build` prints.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path

import torch

from llamarl.machine import GIB
from llamarl.model_spec import shape_named
from llamarl.plan.fallback import async_plans, sync_plan
from llamarl.plan.gpus import GPUS
from llamarl.plan.lengths import Lengths
from llamarl.plan.workload import Question, Workload
from llamarl.rehearse.memory import RoleMemory
from llamarl.rehearse.plans import misfits, rehearse_plan
from llamarl.simulate.rehearse import rehearse_best

CASES = (("llama-3.1-8b", 256), ("llama-3.1-70b", 256), ("llama-3.1-405b", 1024), ("qwen3-32b", 8))
GPU = GPUS["h100"]
WORK = Workload(
    groups=256, samples=8, prompt=512, answers=Lengths("lognormal:median=800,sigma=1,max=8192"), share_prompts=False
)
TARGET = Path(__file__).parent / "results" / "large_worlds.md"
KINDS = ("weights", "optimizer state", "gradients", "gathered", "activations", "KV cache")


def main() -> None:
    lines, problems = list[str](), list[str]()
    for model, gpus in CASES:
        question = Question(shape=shape_named(model), gpu=GPU, gpus=gpus, work=WORK, fallbacks=("fp8",))
        split = rehearse_best(async_plans(question), question)
        plan = split.plan if split else sync_plan(question)
        assert plan is not None, model
        start_s, start_cpu_s = time.perf_counter(), cpu_s()
        roles = rehearse_plan(plan, question)
        took = f"{cpu_s() - start_cpu_s:.0f} s of CPU in {time.perf_counter() - start_s:.0f} s"
        for role in roles:
            name = f"{model} on {gpus}, {'co-located' if plan.colocated else 'split'}, {took}"
            lines += rows(name, role)
        problems += [f"{model}: {line}" for line in misfits(plan, question, roles)]
        print("\n".join(lines[-6:]), flush=True)
    TARGET.write_text(text(lines, problems), encoding="utf-8")


def cpu_s() -> float:
    """CPU time of all rehearsals so far, which run in processes of their own."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def rows(name: str, role: RoleMemory) -> list[str]:
    columns = [(f"rank {rank.rank}", rank.kinds) for rank in role.ranks] + [("formula", role.formula)]
    found = []
    for number, (source, kinds) in enumerate(columns):
        head = f"{name}; {role.role}: {role.layout}" if number == 0 else ""
        cells = " | ".join(f"{kinds[kind] / GIB:.2f}" if kind in kinds else "" for kind in KINDS)
        off = f"{role.difference:+.1%}" if source == "formula" else ""
        found.append(f"| {head} | {source} | {cells} | {sum(kinds.values()) / GIB:.2f} | {off} |")
    return found


ABOUT = """# Ranks of large worlds: built, and by formula

`python benchmarks/large_worlds.py`: the plan of `llamarl plan --model M --gpus N --gpu h100`, whose first and last rank
of trainer and generator are built on fake tensors from the code that trains and generates, as `--build` does. A trainer
rank makes one update of two passes, a generator rank reads prompts and decodes with all slots busy. GiB at the fullest
moment, without the 3 GiB that a plan leaves to CUDA. A last rank of a generator with shards as large as the first one's
is left out. The last column is the formula relative to the fuller rank. The seconds are those of all ranks of a case
together, on {cores} cores ({machine}), torch {torch}.
"""


def text(lines: list[str], problems: list[str]) -> str:
    about = ABOUT.format(cores=os.cpu_count(), machine=platform.machine(), torch=torch.__version__)
    head = [f"| | | {' | '.join(KINDS)} | together | off by |", f"|---|---|{'---:|' * (len(KINDS) + 2)}"]
    misfits = "; ".join(problems) if problems else "nothing."
    return "\n".join([about, *head, *lines, "", f"What does not fit as built: {misfits}", ""])


if __name__ == "__main__":
    main()
