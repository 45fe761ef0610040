"""Claim 20: how cost grows. Seconds an update and trainer waiting over 1 to 1,024 GPUs for 8B, 70B and 405B, asynchronous
against co-located, by the planner and its simulation with the real controller; memory of ranks by building them on fake
tensors.

    python benchmarks/claims/growth_of_cost.py [--runs FOLDER] [--at-most N] [model=llama-3.1-8b] [largest=512] [build=on]

Needs no GPU. An update has 4 prompts x 8 answers for each GPU, so that linear growth means the same seconds an update and
the same GPU-seconds for each answer. With build=on, ranks of the largest plans are built on fake tensors too. Every row is
kept beside the runs: the same command goes on with the next. What keeps a row from linear growth is named from its own
figures. Must: within 5% of linear where no limit is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

import msgspec
from arms import Figures, Options, keep, read_options
from plot import lines

from llamarl.machine import GIB
from llamarl.model_spec import shape_named
from llamarl.plan.fallback import async_plans, sync_plan
from llamarl.plan.gpus import GPUS
from llamarl.plan.lengths import Lengths
from llamarl.plan.report import Rehearsed, layout
from llamarl.plan.search import Plan, Space
from llamarl.plan.workload import Question, Workload
from llamarl.simulate.rehearse import rehearse_best

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GPU, PER_GPU, SAMPLES, MAX_STALENESS = GPUS["h200"], 4, 8, 4
ANSWERS = "lognormal:median=800,sigma=1,max=8192"
MUST = 0.05  # share by which an answer may cost more than in the cheapest row
NOTABLE = 0.04  # share of an update from which a cause is named


def question(model: str, gpus: int) -> Question:
    work = Workload(groups=PER_GPU * gpus, samples=SAMPLES, prompt=512, answers=Lengths(ANSWERS))
    shape = shape_named(model)
    return Question(shape=shape, gpu=GPU, gpus=gpus, work=work, max_staleness=MAX_STALENESS, fallbacks=("fp8",))


def causes_of(found: Rehearsed, asked: Question) -> dict[str, Any]:
    """Figures of a plan from which its limits are named."""
    plan, ranks = found.plan, found.plan.trainers.ranks
    batch = asked.work.batch(asked.gpu, asked.shape.windows)
    busy_s = plan.trainers.update_s + Space(asked).full_s(plan.generators, 1)
    return {
        "tail_share": max(0.0, 1 - busy_s / found.step_s) if plan.colocated else 0.0,
        "weights_share": found.weights_s / found.step_s,
        "waits_for_shards": ranks.waits_for_shards(batch),
        "exchange_share": _exchange_share(plan, asked),
        "offload": ranks.offload,
        "recompute": ranks.recompute,
        "precision": plan.generators.replica.precision,
    }


def limits_of(one: dict[str, Any]) -> list[str]:
    """What costs a row more than its arithmetic, in words; each from a figure of the plan or of its simulation."""
    causes, trainer, generator, named = one["causes"], one["trainer_waits"], one["generator_waits"], list[str]()
    if causes["tail_share"] > NOTABLE:
        named.append(f"longest answer: {causes['tail_share']:.0%} of the time few answers are left to decode")
    elif one["max_staleness"] and min(trainer, generator) > NOTABLE:
        named.append(f"longest answer: trainer ({trainer:.0%}) and generators ({generator:.0%}) both wait for it")
    elif one["max_staleness"] and max(trainer, generator) > NOTABLE:
        who, share = ("the trainer waits", trainer) if trainer > generator else ("generators wait", generator)
        named.append(f"split of the GPUs: {who} {share:.0%} of the time")
    if causes["weights_share"] > NOTABLE:
        named.append(f"weight transfer: {causes['weights_share']:.0%} of an update")
    if causes["waits_for_shards"]:
        named.append("smallest batch per GPU: gathering weights takes longer than computing with them")
    if causes["exchange_share"] > NOTABLE:
        named.append(f"tensor parallelism: {causes['exchange_share']:.0%} of training is communication")
    return named


def notes_on(one: dict[str, Any]) -> list[str]:
    """What memory costs a row. It is the same for all sizes from some size on, so it is no limit of growth."""
    causes = one["causes"]
    found = {
        "optimizer state in host memory": causes["offload"],
        "all blocks computed again": causes["recompute"] == "full",
        "generators in fp8": causes["precision"] == "fp8",
    }
    return [words for words, holds in found.items() if holds]


def _exchange_share(plan: Plan, asked: Question) -> float:
    """Share of an update's time that tensor parallelism adds: what would be gone with free links."""
    ranks, batch = plan.trainers.ranks, asked.work.batch(asked.gpu, asked.shape.windows)
    free = msgspec.structs.replace(asked.gpu, nvlink_gb_s=1e9, nic_gb_s=1e9)
    whole_s = ranks.computing_s(batch)
    return 1 - msgspec.structs.replace(ranks, gpu=free).computing_s(batch) / whole_s


def measured(plans: Sequence[Plan | None], asked: Question) -> dict[str, Any] | None:
    found = rehearse_best([plan for plan in plans if plan and plan.can_be_built], asked)
    if found is None:
        return None
    plan = found.plan
    return {
        "step_s": found.step_s,
        "gpu_s_per_answer": found.step_s * asked.gpus / asked.work.answers_per_update,
        "trainer_waits": found.idle_share["trainer"],
        "generator_waits": found.idle_share["generator"],
        "weights_s": found.weights_s,
        "max_staleness": plan.max_staleness,
        "memory_gib": plan.memory_bytes / GIB,
        "layout": layout(plan),
        "causes": causes_of(found, asked),
    }


def row(model: str, gpus: int, options: Options) -> dict[str, Any]:
    """One size of one model, computed once."""
    file = options.runs / "growth_of_cost" / f"{model}-{gpus}.json"
    if not file.exists():
        options.begin(file.stem)
        asked = question(model, gpus)
        found = {
            "async": measured(async_plans(asked), asked),
            "sync": measured([sync_plan(asked)], asked),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    kept = json.loads(file.read_text())
    return {
        "gpus": gpus,
        **{kind: one and {**one, "limits": limits_of(one), "notes": notes_on(one)} for kind, one in kept.items()},
    }


def built(model: str, gpus: int, options: Options) -> list[dict[str, Any]]:
    """Memory of ranks of the asynchronous plan, on fake tensors and by formula; computed once."""
    file = options.runs / "growth_of_cost" / f"{model}-{gpus}-built.json"
    if not file.exists():
        from llamarl.rehearse.memory import built_figures
        from llamarl.rehearse.plans import rehearse_plan

        options.begin(file.stem)
        asked = question(model, gpus)
        chosen = rehearse_best(async_plans(asked), asked)
        assert chosen is not None
        file.write_text(json.dumps([built_figures(role) for role in rehearse_plan(chosen.plan, asked)]))
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def beyond_linear(rows: Sequence[dict[str, Any]], kind: str) -> dict[int, float]:
    """By GPUs: share by which an answer costs more GPU time than in the cheapest row without a named limit; without such a
    row, than in the cheapest."""
    costs = {one["gpus"]: one[kind]["gpu_s_per_answer"] for one in rows if one[kind]}
    free = [costs[one["gpus"]] for one in rows if one[kind] and not one[kind]["limits"]]
    least = min(free or costs.values(), default=1.0)
    return {gpus: cost / least - 1 for gpus, cost in costs.items()}


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    beyond = {kind: beyond_linear(rows, kind) for kind in ("async", "sync")}
    unnamed = {
        f"{kind}, {one['gpus']} GPUs": beyond[kind][one["gpus"]]
        for kind in beyond
        for one in rows
        if one[kind] and not one[kind]["limits"] and beyond[kind][one["gpus"]] > MUST
    }
    return {"rows": list(rows), "beyond_linear": beyond, "unnamed": unnamed}


def tell(model: str, found: dict[str, Any], memory: Sequence[dict[str, Any]]) -> None:
    print(f"{model}\n  GPUs            seconds an update  trainer waits  GPU-s an answer  beyond linear  limits")
    for one in found["rows"]:
        for kind in ("async", "sync"):
            if (at := one[kind]) is None:
                print(f"{one['gpus']:6,} {kind:5}  nothing fits")
                continue
            over = found["beyond_linear"][kind][one["gpus"]]
            figures = f"{at['step_s']:17.1f}  {at['trainer_waits']:13.0%}  {at['gpu_s_per_answer']:15.2f}  {over:13.1%}"
            print(f"{one['gpus']:6,} {kind:5} {figures}  {'; '.join([*at['limits'], *at['notes']]) or '-'}")
    for role in memory:
        print(f"  {role['role']}: {role['built_bytes'] / GIB:.1f} GiB built, formula {role['off_by']:+.1%}")


def main() -> None:
    options = read_options(__doc__)
    chosen = options.chosen("model", "")
    figures: dict[str, Any] = {}
    models = (chosen,) if chosen else MODELS
    sizes = [gpus for gpus in SIZES if gpus <= int(options.chosen("largest", str(SIZES[-1])))]
    tables = {model: [row(model, gpus, options) for gpus in sizes] for model in models}
    for model, rows in tables.items():
        found, largest = judged(rows), max(one["gpus"] for one in rows if one["async"])
        roles = built(model, largest, options) if options.chosen("build", "") else []
        found["built"] = {"gpus": largest, "roles": roles}
        figures[model] = json.loads(json.dumps(found))
        tell(model, found, found["built"]["roles"])
    met = not any(found["unnamed"] for found in figures.values())
    print(f"within {MUST:.0%} of linear where no limit is named: {'yes' if met else 'NO'}")
    about = {"per_gpu": PER_GPU, "samples": SAMPLES, "answers": ANSWERS, "max_staleness": MAX_STALENESS, "on": GPU.name}
    keep("growth_of_cost", changed(options, made_on={}), {**about, "models": figures, "met": met}, picture)


def picture(figures: Figures) -> str:
    series = {
        f"{model.rpartition('-')[2]} {kind}": [
            (float(one["gpus"]), one[kind]["gpu_s_per_answer"]) for one in found["rows"] if one[kind]
        ]
        for model, found in figures["models"].items()
        for kind in ("async", "sync")
    }
    return lines("Cost of an answer over the number of GPUs", "GPUs", "GPU-seconds an answer", series, log=True)


if __name__ == "__main__":
    main()
