"""How long a job will take here, how sure that is, and what the planner would do instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from msgspec.structs import replace

from llamarl.check.finding import Finding
from llamarl.check.machine import MachineFacts
from llamarl.config import Config, EvaluateConfig
from llamarl.engine.prompts import Prompts
from llamarl.errors import LlamaRLError
from llamarl.machine import GIB
from llamarl.observe.display import format_seconds
from llamarl.plan.fallback import async_plans, sync_plan
from llamarl.plan.gpus import GPUS, Gpu
from llamarl.plan.lengths import Lengths
from llamarl.plan.narrow import narrow_advice
from llamarl.plan.report import layout
from llamarl.plan.workload import Question, Workload
from llamarl.simulate.rehearse import rehearse
from llamarl.simulate.setup import SimulationSetup, make_simulation, shape_of_job

_REHEARSED = 24  # updates that are simulated; the rest is taken to be like them
_BETTER = 0.85  # a plan is told if it takes at most this share of the job's time
_CALIBRATE = "better: llamarl bench --calibrate --json machine.json, then check with --gpu machine.json"


def forecast(config: Config, facts: MachineFacts, prompts: Prompts, gpu: Gpu | None, answers: str) -> Iterator[Finding]:
    """Yield the predicted time, and a plan that would be faster. `gpu` describes the machine, if it was measured or named.
    `answers` are their lengths; empty: unknown, so between those of the task's own answers and the longest possible."""
    if config.agent:
        yield Finding("time", "ok", "not predicted for agents: what they do between their calls is not known")
        return
    if config.sft or (config.teacher and not config.teacher.alone):
        yield Finding("time", "ok", "not predicted for rows of data, or for teachers on the trainer's ranks")
        return
    if not config.generator.replicas or config.engine.hosts:
        yield Finding("time", "ok", "not predicted for generators that join, or for other hosts; see llamarl simulate")
        return
    longest, (prompt, own) = config.generator.max_new_tokens, prompts.typical_lengths()
    shortest = min(longest, max(1, round(own) + 1))  # with the end token
    described = gpu or describe_machine(config, facts)
    gpus = 0 if described.is_cpu else len(facts.gpus)
    try:
        asked = [answers] if answers else [f"fixed:{shortest}", f"fixed:{longest}"]
        scenes = [_scene(config, described, gpus, round(prompt), one) for one in asked]
        found = [make_simulation(scene).run().update_s for scene in scenes]
    except LlamaRLError as error:
        yield Finding("time", "warning", f"not predicted: {error}")
        return
    updates = config.schedule.updates
    each = " to ".join(f"{update_s:.3g}" for update_s in found)
    whole = " to ".join(format_seconds(update_s * updates) for update_s in found)
    lengths = (
        "" if answers else f", for answers of {shortest} tokens as the task's own, to {longest} (--answer says better)"
    )
    told = f"{each} s an update, {whole} for {updates} updates{lengths}; {_how_sure(described)}"
    yield Finding("time", "ok", told, "" if described.source == "measured" else _CALIBRATE)
    if not described.is_cpu:
        if slow := narrow_advice(scenes[-1].shape, config.generator.quantize):
            yield Finding("precision", "warning", slow, "unless memory is short: generator.quantize=none")
        with suppress(LlamaRLError):  # the planner knows fewer models and layouts than the trainer
            yield _better(config, described, scenes[-1], found[-1])


def describe_machine(config: Config, facts: MachineFacts) -> Gpu:
    """A description of this machine in seconds: by the GPU's datasheet, or by the measured limits of the hardware."""
    import torch

    from llamarl.bench.calibrate import uncalibrated

    if facts.gpus and "cpu" not in (config.trainer.device, config.generator.device):
        name = facts.gpus[0].name.lower()
        sheet = next((gpu for gpu in GPUS.values() if gpu.name in name), None)
        if sheet is not None:
            return replace(sheet, memory_gib=facts.gpus[0].total_bytes / GIB)
        return uncalibrated(torch.device("cuda", 0), 1)
    torch.set_num_threads(config.trainer.threads or os.cpu_count() or 1)
    return uncalibrated(torch.device("cpu"), torch.get_num_threads())


def _how_sure(gpu: Gpu) -> str:
    if gpu.source == "measured":
        return f"by the calibration of {gpu.name}"
    basis = f"the datasheet of {gpu.name}" if gpu.source == "datasheet" else f"the measured limits of {gpu.name}"
    return f"a rough guess by {basis}, since it was not calibrated"


def _scene(config: Config, gpu: Gpu, gpus: int, prompt: int, answers: str) -> SimulationSetup:
    schedule = replace(config.schedule, updates=_REHEARSED)  # of fewer, none is in the middle of the line
    short = replace(config, schedule=schedule, evaluate=EvaluateConfig(prompts=0))
    return SimulationSetup(
        config=short,
        shape=shape_of_job(config, ""),
        gpu=gpu,
        gpus=gpus,
        answers=Lengths(answers),
        prompt=max(1, prompt),
    )


def _better(config: Config, gpu: Gpu, scene: SimulationSetup, update_s: float) -> Finding:
    """The planner's best split of the same GPUs for the same work, if it is clearly faster."""
    schedule, narrow = config.schedule, "fp8" if config.model.base == "fp8" else ""
    question = Question(
        shape=scene.shape,
        gpu=gpu,
        gpus=max(1, scene.gpus),
        work=Workload(
            groups=schedule.groups_per_update,
            samples=schedule.samples_per_group,
            prompt=scene.prompt,
            answers=scene.answers,
            share_prompts=config.trainer.share_prompts != "off",
        ),
        max_staleness=max(1, schedule.max_staleness),
        lora=config.model.lora,
        base=narrow or "bf16",
        precisions=(narrow,) if narrow else ("bf16",),
    )
    plans = [plan for plan in (sync_plan(question), *async_plans(question)) if plan and plan.can_be_built]
    if not plans:
        return Finding("better", "ok", "the planner finds no other layout that fits these GPUs")
    best = min((rehearse(plan, question) for plan in plans), key=lambda one: one.step_s)
    if best.step_s > _BETTER * update_s:
        return Finding(
            "better", "ok", f"the planner finds nothing clearly faster (its best: {best.step_s:.3g} s an update)"
        )
    sides = layout(best.plan)
    trainer, generator = sides["trainer"], sides["generator"]
    settings = (
        f"placement={sides['placement']} trainer.data={trainer['data']} trainer.context={trainer['context']} "
        f"trainer.tensor={trainer['tensor']} "
        f"trainer.recompute={trainer['recompute']} trainer.tokens_per_pack={trainer['tokens_per_pack']} "
        f"generator.replicas={generator['replicas']} generator.tensor={generator['tensor']} "
        f"generator.slots={generator['slots']} schedule.max_staleness={best.plan.max_staleness}"
    )
    return Finding(
        "better", "warning", f"the planner predicts {best.step_s:.3g} s an update instead", f"try: {settings}"
    )
