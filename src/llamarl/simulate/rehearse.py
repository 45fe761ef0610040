"""Tries a plan before it is shown: the simulation runs some updates of it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from llamarl.config import Config, EngineConfig, EvaluateConfig, ScheduleConfig, SnapshotsConfig
from llamarl.config.file import parse_config
from llamarl.plan.fallback import async_plan
from llamarl.plan.jobfile import job_settings
from llamarl.plan.narrow import narrow_advice
from llamarl.plan.report import Rehearsed
from llamarl.plan.search import Plan, with_one_more
from llamarl.plan.workload import Question
from llamarl.simulate.setup import SimulationSetup, make_simulation

_GROUPS = 4000  # number of groups to rehearse, about
_UPDATES = (8, 24)  # smallest and largest number of updates
_CLEARLY = 0.95  # of the time of an update; the planner itself is within 3% or so


def rehearse(plan: Plan, question: Question) -> Rehearsed:
    scene = scene_of(plan, question)
    found = make_simulation(scene).run()
    return Rehearsed(plan, found.update_s, found.idle_share, with_one_more(question, plan), scene.load_s)


def rehearse_best(plans: Sequence[Plan], question: Question) -> Rehearsed | None:
    """Tries every plan; returns the one with the lowest price in the simulation."""
    return min((rehearse(plan, question) for plan in plans), key=lambda found: found.price, default=None)


def rehearse_narrow(found: Rehearsed, question: Question) -> Rehearsed | None:
    """The asynchronous plan with generators in fp8 that is best by closed form, if it is clearly faster than one in bf16."""
    wide = found.plan.generators.replica.precision == "bf16"
    if not wide or question.lora or narrow_advice(question.shape, "fp8") or not question.saves_memory("fp8"):
        return None
    plan = async_plan(replace(question, precisions=("fp8",), fallbacks=()))
    narrow = rehearse(plan, question) if plan else None
    return narrow if narrow and narrow.step_s < _CLEARLY * found.step_s else None


def beside_s(found: Rehearsed, question: Question) -> float | None:
    """Seconds an update of a plan whose roles share a GPU, side by side (engine.mps); None if that is not clearly less."""
    if not found.plan.shares_gpu or question.gpu.is_cpu:
        return None
    scene = scene_of(found.plan, question)
    beside = make_simulation(replace(scene, config=replace(scene.config, engine=EngineConfig(mps="auto")))).run()
    return beside.update_s if beside.update_s < _CLEARLY * found.step_s else None


def scene_of(plan: Plan, question: Question) -> SimulationSetup:
    work = question.work
    updates = min(_UPDATES[1], max(_UPDATES[0], _GROUPS // work.groups))
    return SimulationSetup(
        config=_without_extras(plan, question, updates),
        shape=question.shape,
        gpu=question.gpu,
        answers=work.answers,
        prompt=work.prompt,
        precision=plan.generators.replica.precision,
        skipped=work.skipped,
        gpus=question.gpus if plan.shares_gpu else 0,
    )


def _without_extras(plan: Plan, question: Question, updates: int) -> Config:
    """The job without evaluations, snapshots and probes."""
    settings = job_settings(plan, question)
    if question.gpu.is_cpu:
        settings["generator"]["threads"] = settings["trainer"]["threads"] = question.gpu.threads
    config = parse_config(settings)
    schedule: ScheduleConfig = replace(config.schedule, updates=updates, probe_every=0)
    return replace(config, schedule=schedule, evaluate=EvaluateConfig(prompts=0), snapshots=SnapshotsConfig(every=0))
