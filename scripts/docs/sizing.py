"""Writes docs/sizing.md: what jobs of five sizes take on 1 to 1,024 GPUs, by the planner and its simulation.

python scripts/docs/sizing.py [--row MODEL GPUS LORA_RANK]

Needs no GPU and no torch, and takes some minutes. With --row it prints one row and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llamarl.config import LoraConfig
from llamarl.model_spec import shape_named
from llamarl.plan.advice import why_nothing_fits
from llamarl.plan.fallback import async_plans, offloaded, sync_plan, widened
from llamarl.plan.gpus import GPUS
from llamarl.plan.lengths import Lengths
from llamarl.plan.report import Rehearsed
from llamarl.plan.workload import Question, Workload
from llamarl.simulate.rehearse import rehearse

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
GPU, RANK, UPDATES = GPUS["h200"], 32, 1000
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "llama-3.1-405b")
SIZES = (1, 8, 64, 256, 1024)
WORK = Workload(groups=256, samples=8, prompt=512, answers=Lengths("lognormal:median=800,sigma=1,max=8192"))
HEAD = (
    "| GPUs | plan | trainer | generators | seconds an update | answer tokens/s | GPU-hours for 1,000 updates | limited by |",
    "|---:|---|---|---|---:|---:|---:|---|",
)


def question(model: str, gpus: int, rank: int) -> Question:
    lora = LoraConfig(rank=rank)
    return Question(shape=shape_named(model), gpu=GPU, gpus=gpus, work=WORK, lora=lora, fallbacks=("fp8",))


def fastest(asked: Question) -> Rehearsed | None:
    """The faster of the asynchronous and the co-located plan, among those that can be built."""
    plans = [plan for plan in (*async_plans(asked), sync_plan(asked)) if plan is not None and plan.can_be_built]
    return min((rehearse(plan, asked) for plan in plans), key=lambda found: found.step_s, default=None)


def row(model: str, gpus: int, rank: int) -> str:
    asked = question(model, gpus, rank)
    found = fastest(asked)
    if found is None:
        reason = why_nothing_fits(offloaded(widened(asked))).partition(", ")[2].partition(". ")[0]
        return f"| {gpus:,} | nothing fits: {reason} | | | | | | |"
    plan, step_s = found.plan, found.step_s
    ranks, replica = plan.trainers.ranks, plan.generators.replica
    tokens = WORK.answers_per_update * WORK.answers.mean
    where = "co-located" if plan.colocated else "one GPU, shared" if plan.shares_gpu else "asynchronous"
    base = ", base in fp8" if rank and ranks.base == "fp8" else ""
    away = ", optimizer state in host memory" if ranks.offload else ""
    again = "" if ranks.recompute == "none" else f", recompute {ranks.recompute}"
    trainer = f"{ranks.ranks:,}: {ranks.layout}, {ranks.tokens_per_pack:,} tokens a pass{again}{away}{base}"
    generators = f"{int(plan.generators.replicas):,} x TP {replica.tp}, {replica.precision}, {replica.slots} slots"
    hours = step_s * UPDATES * gpus / 3600
    figures = f"{_short(step_s)} | {tokens / step_s:,.0f} | {hours:,.0f}"
    return f"| {gpus:,} | {where} | {trainer} | {generators} | {figures} | {plan.limit} |"


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


ABOUT = f"""# Sizing

What a job takes, by model and number of GPUs: {WORK.groups} prompts x {WORK.samples} answers an update, prompts of
{WORK.prompt} tokens, answers {WORK.answers.spec} (mean {WORK.answers.mean:,.0f}), staleness 1,
on {GPU.name.upper()} GPUs with 8 to a host. This page is made by one command, without a GPU:

    python scripts/docs/sizing.py

Every row is the faster of the asynchronous and the co-located plan of `llamarl plan`, and its time is that of a simulation
with the real controller ([theory](theory.md)). All figures are predicted, from the datasheet and from factors that were
measured on one H200; [results](results-more.md#10-predicted-and-measured) has both side by side. Rows of LoRA have
rank {RANK} on all layers. Generators are in bf16 where that fits, otherwise in fp8. The plan of another job, another GPU or
other lengths:

    llamarl plan --model llama-3.1-8b --gpus 64 --gpu h200 --groups 256 --samples 8 --prompt 512 \\
        --answer lognormal:median=800,sigma=1,max=8192 --lora {RANK}

GPU-hours are seconds an update x {UPDATES:,} x GPUs / 3,600, without startup, evaluations and snapshots. The batch is the
same in all rows. So beyond some number of GPUs an update cannot become shorter: its longest answer, of up to
{WORK.answers.longest:,} tokens, is decoded one token after another, and the hours grow with the GPUs. More GPUs pay with
larger batches ([how cost grows](results-second-round.md#20-how-cost-grows)).
"""


def page() -> str:
    lines = [ABOUT]
    for model in MODELS:
        for title, rank in (("all weights", 0), (f"LoRA, rank {RANK}", RANK)):
            lines += [f"## {model}, {title}", "", *HEAD, *(row(model, gpus, rank) for gpus in SIZES), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=3, metavar=("MODEL", "GPUS", "LORA_RANK"))
    args = parser.parse_args()
    if args.row:
        print(row(args.row[0], int(args.row[1]), int(args.row[2])))
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
