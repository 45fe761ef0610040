"""Reports plans as a table for people and as figures for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from llamarl.machine import GIB
from llamarl.plan.search import Plan, priced
from llamarl.plan.workload import Question


class Rehearsed(Struct, frozen=True):
    """A plan with the results of its simulation."""

    plan: Plan
    step_s: float
    idle_share: dict[str, float]
    one_more_s: float  # seconds by which one more GPU would shorten a step
    weights_s: float  # seconds of a weight transfer

    @property
    def price(self) -> float:
        """As `Plan.price`, with the time of the simulation."""
        return priced(self.step_s, self.plan.max_staleness)


def figures(found: Rehearsed | None) -> dict[str, Any] | None:
    """The figures of a plan for `--json`; None if nothing fits."""
    if found is None:
        return None
    plan = found.plan
    return {
        "step_s": found.step_s,
        "formula_s": plan.step_s,
        "idle_share": {role: found.idle_share[role] for role in ("trainer", "generator")},
        "memory_gib": plan.memory_bytes / GIB,
        "layout": layout(plan),
        "max_staleness": plan.max_staleness,
        "limit": plan.limit,
        "one_more_gpu_s": found.one_more_s,
        "weights_s": found.weights_s,
        "note": plan.note,
    }


def layout(plan: Plan) -> dict[str, Any]:
    """GPUs, parallelism, precision and memory of trainer and generator."""
    trainer, replica = plan.trainers.ranks, plan.generators.replica
    return {
        "placement": "colocated" if plan.colocated else "split",
        "trainer": {
            "gpus": trainer.ranks,
            "replicate": trainer.replicate,
            "data": trainer.data,
            "context": trainer.context,
            "tensor": trainer.tp,
            "expert": trainer.expert,
            "recompute": trainer.recompute,
            "tokens_per_pack": trainer.tokens_per_pack,
            "precision": trainer.precision,
            "offload": trainer.offload,
            "memory_gib": plan.trainers.memory_bytes / GIB,
            "host_gib": trainer.host_bytes / GIB,
        },
        "generator": {
            "gpus": int(plan.generators.replicas) * replica.tp,
            "replicas": int(plan.generators.replicas),
            "tensor": replica.tp,
            "expert": replica.expert,
            "slots": replica.slots,
            "precision": replica.precision,
            "memory_gib": plan.generators.memory_bytes / GIB,
        },
    }


def table(question: Question, plans: Sequence[tuple[str, Rehearsed | None]]) -> list[str]:
    """A text table with one column per plan."""
    columns = [(name, _column(found)) for name, found in plans if found is not None]
    rows = [("", [name for name, _ in columns])]
    rows += [(label, [column[label] for _, column in columns]) for label in (columns[0][1] if columns else ())]
    work = question.work
    title = (
        f"{question.gpus} x {question.gpu.name} ({question.gpu.source}), {work.groups} x {work.samples} answers an update, "
        f"prompt {work.prompt}, answers {work.answers.spec} (mean {work.answers.mean:.0f})"
    )
    width = max((len(cell) + 2 for _, cells in rows for cell in cells), default=0)
    cells = [f"  {label:<18}" + "".join(f"{cell:<{width}}" for cell in cells).rstrip() for label, cells in rows]
    return [title, *cells, *(f"{name}: {found.plan.note}" for name, found in plans if found and found.plan.note)]


def _column(found: Rehearsed) -> dict[str, str]:
    plan = found.plan
    trainer, replica = plan.trainers.ranks, plan.generators.replica
    away = ", offload" if trainer.offload else ""
    packs = f"{trainer.tokens_per_pack} tokens a pass, recompute {trainer.recompute}{away}"
    return {
        "step": f"{found.step_s:.2f} s",
        "trainer": f"{trainer.ranks} GPUs: {trainer.layout}",
        "": packs,
        "generators": f"{int(plan.generators.replicas)} x {replica.layout}, {replica.precision}",
        "slots": f"{replica.slots} of each replica",
        "training": f"{plan.trainers.update_s:.2f} s an update",
        "weights": f"{found.weights_s:.3f} s from trainer to generators",
        "waiting": ", ".join(f"{role} {found.idle_share[role]:.0%}" for role in ("trainer", "generator")),
        "memory": f"{plan.memory_bytes / GIB:.1f} GiB on the fullest GPU",
        "staleness": f"at most {plan.max_staleness}",
        "limited by": plan.limit,
        "one GPU more": f"{found.one_more_s:.3f} s less",
    }
