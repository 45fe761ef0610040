"""Does it scale? The best asynchronous plan from 8 to 1,024 GPUs, rehearsed with the real controller.

    python benchmarks/growth.py [--model llama-3.1-8b] [--gpu h100] [--per-gpu 1] [--json result.json]

An update has as many prompts as there are GPUs (times --per-gpu), with 8 answers each, so that the work of a GPU stays the
same. Controller: seconds of this machine's core in `handle`, for all that a group needs; everything else is predicted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from llamarl.model_spec import shape_named
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths
from llamarl.plan.search import best_async
from llamarl.plan.workload import Question, Workload
from llamarl.simulate.rehearse import scene_of
from llamarl.simulate.setup import make_simulation

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLES, PROMPT, ANSWERS = 8, 512, "lognormal:median=800,sigma=1,max=8192"


def measure(model: str, gpu: str, gpus: int, per_gpu: int) -> dict[str, float]:
    groups = gpus * per_gpu
    work = Workload(groups=groups, samples=SAMPLES, prompt=PROMPT, answers=Lengths(ANSWERS), share_prompts=False)
    question = Question(shape=shape_named(model), gpu=gpu_named(gpu), gpus=gpus, work=work)
    plan = best_async(question)
    if plan is None:
        raise SystemExit(f"{model} does not fit on {gpus} {gpu}")
    found = make_simulation(scene_of(plan, question)).run()
    return {
        "gpus": gpus,
        "groups": groups,
        "replicas": plan.generators.replicas,
        "step_s": found.update_s,
        "gpu_s_per_sample": found.update_s * gpus / (groups * SAMPLES),
        "ms_per_sample": 1e3 * found.update_s / (groups * SAMPLES),
        "controller_us_per_group": 1e6 * found.controller_s / found.groups,
        "controller_share": found.controller_s / found.wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--per-gpu", type=int, default=1, help="prompts of an update for each GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        "| GPUs | prompts | replicas | step, s | ms per sample | GPU-s per sample | controller, us per group | of the time |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    rows = []
    for gpus in GPUS:
        row = measure(args.model, args.gpu, gpus, args.per_gpu)
        rows.append(row)
        print(
            f"| {row['gpus']:,} | {row['groups']:,} | {row['replicas']:.0f} | {row['step_s']:.2f} "
            f"| {row['ms_per_sample']:.2f} | {row['gpu_s_per_sample']:.2f} | {row['controller_us_per_group']:.0f} "
            f"| {row['controller_share']:.3%} |"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
