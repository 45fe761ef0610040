"""Is an update as long as it was predicted to be? Runs that were made, held against their rehearsal by `llamarl simulate`.

    llamarl bench --calibrate --json machine.json
    llamarl train job.yaml --run runs/a
    python benchmarks/predictions.py --gpu machine.json [--gpus 1] runs/a [runs/b ...] [--json result.json]

Of a run only what is no time is read: its settings, how many tokens prompts and answers had, how many answers were cut off
and how many groups had equal rewards. From these, and from the machine's description, the simulation predicts the time of an
update, which is compared with the run's own (mean from a tenth of the run on). Needs no GPU and no torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from llamarl.configfile import load_config
from llamarl.observe.run_folder import CONFIG, METRICS, SUMMARY, TIMINGS, read_rows
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths, lognormal_with
from llamarl.simulate.scene import Scene, make_simulation, shape_of_job


def measured(run: Path) -> dict[str, float]:
    """Seconds of an update, and what was waited, from the run's record."""
    rows = [row for row in read_rows(run / TIMINGS) if "update" in row]
    counted = rows[max(1, len(rows) // 10) :]
    idle = json.loads((run / SUMMARY).read_text())["idle_share"]
    return {
        "update_s": fmean(row["update_s"] for row in counted),
        "compute_s": fmean(row.get("compute_s", 0.0) for row in counted),
        **{f"{role}_idle": idle[role] for role in ("trainer", "generator")},
    }


def seen(run: Path, limit: int) -> tuple[int, Lengths, float]:
    """Tokens of a prompt, lengths of answers, share of groups with equal rewards."""
    metrics = [row for row in read_rows(run / METRICS) if row["role"] == "trainer"]
    timings = [row for row in read_rows(run / TIMINGS) if "update" in row and "compute_s" in row]
    answer = fmean(row["answer_tokens"] for row in metrics)
    skipped = fmean(row["zero_variance_share"] for row in metrics)
    truncated = fmean(row["truncated_share"] for row in metrics)
    keeps = load_config(run / CONFIG).algo.zero_variance == "keep"
    trained = [row["completions"] * (1 if keeps else 1 - row["zero_variance_share"]) for row in metrics]
    document = sum(row["tokens_per_s"] * row["compute_s"] for row in timings) / max(1.0, sum(trained))
    return max(1, round(document - answer)), lengths_of(answer, truncated, limit), skipped


def lengths_of(mean: float, truncated: float, limit: int) -> Lengths:
    if truncated > 0.5 or mean > 0.97 * limit:
        return Lengths(f"fixed:{min(limit, round(mean))}")
    return lognormal_with(mean, truncated, limit)


def predicted(run: Path, gpu: str, gpus: int, model: str) -> dict[str, float]:
    config = load_config(run / CONFIG)
    prompt, answers, skipped = seen(run, config.generator.max_new_tokens)
    scene = Scene(
        config=config,
        shape=shape_of_job(config, model),
        gpu=gpu_named(gpu),
        gpus=gpus,
        answers=answers,
        prompt=prompt,
        skipped=skipped,
    )
    found = make_simulation(scene).run()
    return {"update_s": found.update_s, **{f"{role}_idle": share for role, share in found.idle_share.items()}}


def compare(run: Path, gpu: str, gpus: int, model: str) -> dict[str, Any]:
    was, said = measured(run), predicted(run, gpu, gpus, model)
    return {"run": run.name, "measured": was, "predicted": said, "error": said["update_s"] / was["update_s"] - 1}


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| run | update measured, s | predicted, s | error | waiting, trainer / generator | predicted |")
    print("|---|---:|---:|---:|---|---|")
    for row in rows:
        was, said = row["measured"], row["predicted"]
        print(
            f"| {row['run']} | {was['update_s']:.3f} | {said['update_s']:.3f} | {row['error']:+.1%} "
            f"| {was['trainer_idle']:.0%} / {was['generator_idle']:.0%} "
            f"| {said['trainer_idle']:.0%} / {said['generator_idle']:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--gpu", required=True, help="the machine's description, by `llamarl bench --calibrate`")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs there were; 0: one for each rank")
    parser.add_argument("--model", default="", help="a shape by name, where the model folder is not here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [compare(run, args.gpu, args.gpus, args.model) for run in args.runs]
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
