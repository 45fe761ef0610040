"""A run held against its rehearsal by `llamarl simulate`, and, where it was synchronous, against `llamarl plan`.

Of a run only what is no time is read: its settings, how many tokens prompts and answers had, and how many groups had equal
rewards. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from llamarl.config.file import load_config
from llamarl.io.record_log import read_records
from llamarl.observe.rows import read_rows
from llamarl.observe.run_folder import CONFIG, GROUPS, LOGS, METRICS, TIMINGS
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths, lognormal_with
from llamarl.plan.search import best_sync
from llamarl.plan.workload import Question, Workload
from llamarl.simulate.setup import SimulationSetup, make_simulation, shape_of_job
from llamarl.types import RolloutGroup

ENOUGH = 32  # groups whose lengths say more than a mean does
LENGTHS, PROMPT = "lengths", "prompt_tokens"  # of all answers, and of a prompt on average; in the run's folder


def measured(run: Path, warm_up: int = 1) -> dict[str, float]:
    """Seconds of an update, and of the passes in it, from the run's record: all updates but the first tenth, and at least
    `warm_up`."""
    rows = [row for row in read_rows(run / TIMINGS) if "update" in row]
    counted = rows[max(warm_up, len(rows) // 10) :]
    return {
        "update_s": fmean(row["update_s"] for row in counted),
        "training_s": fmean(row.get("compute_s", 0.0) for row in counted),
    }


def seen(run: Path, limit: int) -> tuple[int, Lengths, float]:
    """Tokens of a prompt, lengths of answers, share of answer tokens in groups with equal rewards."""
    metrics = [row for row in read_rows(run / METRICS) if row["role"] == "trainer"]
    skipped = 1 - sum(row["trained_tokens"] for row in metrics) / sum(map(_answer_tokens, metrics))
    groups = list(stored(run))
    if len(groups) >= ENOUGH:
        prompt = fmean(len(group.prompt.prompt_tokens) // 4 for group in groups)
        tokens = [str(one.completion.num_tokens) for group in groups for one in group.rollouts]
        (run / LENGTHS).write_text("\n".join(tokens))
        (run / PROMPT).write_text(f"{prompt:.1f}\n")
    if (run / LENGTHS).exists():  # from now on without the groups, which are large
        return max(1, round(float((run / PROMPT).read_text()))), Lengths(f"file:{run / LENGTHS}"), skipped
    mean = fmean(row["answer_tokens"] for row in metrics)
    truncated = fmean(row["truncated_share"] for row in metrics)
    return max(1, round(document_tokens(run, metrics) - mean)), lengths_of(mean, truncated, limit), skipped


def _answer_tokens(row: dict[str, Any]) -> float:
    return float(row["answer_tokens"] * row["completions"])


def stored(run: Path) -> Iterator[RolloutGroup]:
    """What is left in the run's store: of a short run, all its groups."""
    for _, record in read_records(run / GROUPS) if (run / GROUPS).is_dir() else ():
        yield msgspec.msgpack.decode(record, type=RolloutGroup)


def document_tokens(run: Path, metrics: list[dict[str, Any]]) -> float:
    """Prompt and answer, on average over what was trained on."""
    timings = [row for row in read_rows(run / TIMINGS) if "update" in row and "compute_s" in row]
    keeps = load_config(run / CONFIG).algo.zero_variance == "keep"
    trained = [row["completions"] * (1 if keeps else 1 - row["zero_variance_share"]) for row in metrics]
    return float(sum(row["tokens_per_s"] * row["compute_s"] for row in timings) / max(1.0, sum(trained)))


def lengths_of(mean: float, truncated: float, limit: int) -> Lengths:
    if truncated > 0.5 or mean > 0.97 * limit:
        return Lengths(f"fixed:{min(limit, round(mean))}")
    return lognormal_with(mean, truncated, limit)


def scene_of(run: Path, gpu: str, gpus: int, model: str) -> SimulationSetup:
    config = load_config(run / CONFIG)
    prompt, answers, skipped = seen(run, config.generator.max_new_tokens)
    log = run / LOGS / "mps.log"  # `auto` does not say whether the daemon came up and was found
    mps: Literal["on", "off"] = "on" if log.exists() and "NEW CLIENT" in log.read_text() else "off"
    return SimulationSetup(
        config=replace(config, engine=replace(config.engine, mps=mps)),
        shape=shape_of_job(config, model),
        gpu=gpu_named(gpu),
        gpus=gpus,
        answers=answers,
        prompt=prompt,
        skipped=skipped,
    )


def predicted(scene: SimulationSetup) -> dict[str, float]:
    found = make_simulation(scene).run()
    return {"update_s": found.update_s, "training_s": found.update_s * (1 - found.idle_share["trainer"])}


def planned(scene: SimulationSetup) -> float | None:
    """The planner's closed form. It plans for GPUs that executors have to themselves, or share in turn."""
    schedule = scene.config.schedule
    if schedule.max_staleness:
        return None
    work = Workload(
        groups=schedule.groups_per_update,
        samples=schedule.samples_per_group,
        prompt=scene.prompt,
        answers=scene.answers,
        skipped=scene.skipped,
        share_prompts=scene.config.trainer.share_prompts != "off",
    )
    gpus = scene.gpus or scene.trainer.ranks
    plan = best_sync(
        Question(shape=scene.shape, gpu=scene.gpu, gpus=gpus, work=work, precisions=(scene.generator_precision,))
    )
    return plan.step_s if plan else None


def compare(run: Path, gpu: str, gpus: int, model: str) -> dict[str, Any]:
    was, said = measured(run), predicted(scene_of(run, gpu, gpus, model))
    return {"run": run.name, "measured": was, "predicted": said, "error": said["update_s"] / was["update_s"] - 1}


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| run | update measured, s | predicted, s | error | of it training, s | predicted, s |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        was, said = row["measured"], row["predicted"]
        print(
            f"| {row['run']} | {was['update_s']:.3f} | {said['update_s']:.3f} | {row['error']:+.1%} "
            f"| {was['training_s']:.3f} | {said['training_s']:.3f} |"
        )
