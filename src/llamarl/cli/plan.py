"""`llamarl plan` and `llamarl simulate`: predict the cost of a job, without torch and without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from llamarl.cli.help_format import CONFIG_FILE, OVERRIDES
from llamarl.config.hub_names import name_on_hub
from llamarl.errors import ConfigError, InputError
from llamarl.model_spec import SHAPES

if TYPE_CHECKING:
    from llamarl.config import Config
    from llamarl.observe.timeline import Timeline
    from llamarl.plan.report import Rehearsed
    from llamarl.plan.workload import Question
    from llamarl.rehearse.memory import RoleMemory

MODEL_HELP = f"a model folder, a config.json, a name on the hub, or one of: {', '.join(SHAPES)}"

GpuOption = Annotated[
    str, typer.Option(metavar="NAME", help="a100, h100, h200, b200, l40s, or a .json file of `bench --calibrate`")
]
AnswerOption = Annotated[
    str,
    typer.Option(
        metavar="LENGTHS",
        help="tokens of the answers: fixed:N, uniform:min=A,max=B, lognormal:median=M,sigma=S,max=N, file:PATH",
    ),
]
SkippedOption = Annotated[
    float, typer.Option(min=0.0, max=0.99, help="share of groups whose rewards are all equal: not trained on")
]
PromptOption = Annotated[int, typer.Option(min=0, help="tokens of a prompt; 0: as many as it may have")]

_MANY = 256  # GPUs, above which plans take many seconds


class SharePrompts(StrEnum):
    auto = "auto"
    off = "off"


def plan_command(
    model: Annotated[str, typer.Option(metavar="NAME", help=MODEL_HELP)],
    gpus: Annotated[int, typer.Option(min=1, max=32_768, help="GPUs in all")],
    gpu: GpuOption = "h100",
    groups: Annotated[int, typer.Option(min=1, help="prompts of one update")] = 256,
    samples: Annotated[int, typer.Option(min=2, help="answers to each prompt")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of a prompt")] = 512,
    answer: AnswerOption = "lognormal:median=800,sigma=1,max=8192",
    skipped: SkippedOption = 0.0,
    max_staleness: Annotated[int, typer.Option(min=1, help="versions a trained group may lag behind")] = 1,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="of the generators: bf16 or fp8; may be given twice; without it: bf16, or fp8 where bf16 does not fit",
        ),
    ] = None,
    share_prompts: Annotated[
        SharePrompts | None,
        typer.Option(
            help="whether the trainer computes a prompt once for all its answers, where it pays (trainer.share_prompts); "
            "without it: as the job of --config says"
        ),
    ] = None,
    expert: Annotated[
        int, typer.Option(min=1, help="parts of the tensor ranks that hold different experts (trainer.expert)")
    ] = 1,
    lora: Annotated[
        int, typer.Option(metavar="RANK", min=0, help="train LoRA adapters of this rank on all layers; 0: all weights")
    ] = 0,
    lora_base: Annotated[
        str,
        typer.Option(
            "--base",
            metavar="NAME",
            help="with --lora, precision of the frozen weights; without it: bf16, or fp8 where bf16 does not fit",
        ),
    ] = "",
    base: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="a job whose other settings are kept")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the asynchronous plan's job here")] = None,
    build: Annotated[
        bool, typer.Option("--build", help="also build ranks of the plan on fake tensors, and count their memory")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Split GPUs between trainer and generators: the best synchronous and the best asynchronous plan, side by side."""
    from llamarl.config import LoraConfig
    from llamarl.model.hf_config import find_shape
    from llamarl.plan.advice import why_nothing_fits
    from llamarl.plan.fallback import async_plans, offloaded, sync_plan, widened
    from llamarl.plan.gpus import gpu_named
    from llamarl.plan.lengths import Lengths
    from llamarl.plan.narrow import narrow_advice
    from llamarl.plan.report import figures, table
    from llamarl.plan.workload import Question, Workload
    from llamarl.rehearse.memory import built_figures
    from llamarl.simulate.rehearse import beside_s, rehearse, rehearse_best, rehearse_narrow

    settled = gpu_named(gpu)
    if unknown := [name for name in precision or [] if name not in settled.precisions]:
        raise InputError(f"--precision {unknown[0]}: {settled.name} has {', '.join(settled.precisions)}")
    _check_base(lora_base, lora, settled.precisions)
    shape = find_shape(_with_sizes(model, "--model"))
    question = Question(
        shape=shape,
        gpu=settled,
        gpus=gpus,
        work=Workload(
            groups=groups,
            samples=samples,
            prompt=prompt,
            answers=Lengths(answer),
            skipped=skipped,
            share_prompts=_shares_prompts(base) if share_prompts is None else share_prompts is SharePrompts.auto,
        ),
        max_staleness=max_staleness,
        precisions=tuple(precision or [lora_base or ("fp32" if settled.is_cpu else "bf16")]),
        lora=LoraConfig(rank=lora, targets="attention" if shape.experts else "all"),
        expert=expert,
        base=lora_base or ("fp32" if settled.is_cpu else "bf16"),
        fallbacks=() if precision or lora_base or "fp8" not in settled.precisions else ("fp8",),
    )
    if gpus > _MANY:
        print("searching plans, and simulating the best: up to a minute", file=sys.stderr, flush=True)
    co_located, splits = sync_plan(question), async_plans(question)
    if not any(plan and plan.can_be_built for plan in (co_located, *splits)):
        raise InputError(why_nothing_fits(offloaded(widened(question))))
    sync, split = rehearse(co_located, question) if co_located else None, rehearse_best(splits, question)
    gain = sync.step_s / split.step_s if sync and split else None
    narrow = rehearse_narrow(split, question) if split and question.fallbacks else None
    beside = beside_s(split, question) if split else None
    chosen = min(filter(None, (split, sync)), key=lambda found: (not found.plan.can_be_built, found.price))
    text = job_text(model, base, chosen, question)
    if out is not None:
        _write(out, text)
    built, problems = rehearsed_ranks(chosen, question) if build else ([], [])
    if as_json:
        ranks: dict[str, object] = (
            {"built": [built_figures(role) for role in built], "problems": problems} if build else {}
        )
        found = {
            "sync": figures(sync),
            "async": figures(split),
            "gain": gain,
            "narrow": figures(narrow),
            "beside_s": beside,
            **ranks,
        }
        print(msgspec.json.encode(found).decode())
        _refuse_misfits(problems)
        return
    print("\n".join(table(question, [("synchronous, co-located", sync), ("asynchronous", split)])))
    print(f"gain               {gain:.2f}x" if gain else f"no gain: {_missing(sync is None)}")
    asked_for = "fp8" if "fp8" in question.precisions and not question.has_narrow_base else ""
    if slow := narrow_advice(question.shape, asked_for):
        print(f"note               {slow}")
    if narrow:
        print(f"note               with generators in fp8 about {narrow.step_s:.2f} s an update: --precision fp8")
    if beside:
        print(
            f"note               side by side by NVIDIA's MPS about {beside:.2f} s an update: engine.mps=auto in the job"
        )
    _print_built(built)
    _refuse_misfits(problems)
    print(f"job written to {out}: llamarl train {out}" if out else f"\n{text}", end="\n" if out else "")


def _shares_prompts(base: Path | None) -> bool:
    """Whether the job whose settings are kept says so; without one, as any job."""
    from llamarl.config import TrainerConfig
    from llamarl.config.file import load_config

    settings = TrainerConfig() if base is None else load_config(base).trainer
    return settings.share_prompts != "off"


def _check_base(base: str, lora: int, known: Sequence[str]) -> None:
    if base and not lora:
        raise InputError("--base: cannot take effect without --lora")
    if base and (base not in ("bf16", "fp8") or base not in known):
        raise InputError(f"--base {base}: expected {' or '.join(name for name in ('bf16', 'fp8') if name in known)}")


def rehearsed_ranks(found: Rehearsed, question: Question) -> tuple[list[RoleMemory], list[str]]:
    """Memory of the plan's ranks as built, and what does not fit. Raises InputError if they cannot be built."""
    from llamarl.rehearse.plans import misfits, rehearse_plan

    if question.gpu.is_cpu:
        raise InputError("--build: rehearses GPUs only, and the plan is for a CPU")
    print("building ranks of the plan on fake tensors: one or two minutes", file=sys.stderr, flush=True)
    roles = rehearse_plan(found.plan, question)
    return roles, misfits(found.plan, question, roles)


def _refuse_misfits(problems: list[str]) -> None:
    if problems:
        raise InputError(f"--build: {'; '.join(problems)}")


def _print_built(roles: list[RoleMemory]) -> None:
    from llamarl.rehearse.memory import table_of

    if roles:
        print("\n".join(table_of(roles)))


def _missing(no_sync: bool) -> str:
    return "the synchronous plan does not fit" if no_sync else "there are too few GPUs for an asynchronous plan"


def job_text(model: str, base: Path | None, rehearsed: Rehearsed, question: Question) -> str:
    """The YAML of a plan; a comment on top says so if it cannot be run as a job."""
    from llamarl.config.file import parse_config, read_settings
    from llamarl.config.in_vain import refuse_settings_in_vain
    from llamarl.plan.jobfile import job_settings, job_yaml, merged

    plan = rehearsed.plan
    settings = merged(
        read_settings(base) if base else {"model": {"path": _folder(model)}}, job_settings(plan, question)
    )
    kind = "co-located" if plan.colocated else "split"
    head = f"{model} on {question.gpus} {question.gpu.name}, {kind}: about {rehearsed.step_s:.2f} s an update"
    try:
        refuse_settings_in_vain(parse_config(settings))
    except ConfigError as error:
        return f"# This plan cannot be run as a job yet: {error}\n{job_yaml(settings, head)}"
    return job_yaml(settings, head)


def _with_sizes(model: str, setting: str) -> str:
    """What says a model's sizes: the name of a known one, a folder, or the config.json of one on the hub, fetched first."""
    from llamarl.hub.models import fetch_model_config

    return model if model.rpartition("/")[2].lower() in SHAPES else fetch_model_config(model, setting)


def _shape_asked(config: Config, model: str) -> str:
    """The model whose sizes are simulated; empty: that of the job's folder."""
    if model:
        return _with_sizes(model, "--model")
    try:
        return _with_sizes(config.model.path, "model.path") if name_on_hub(config.model.path) else ""
    except InputError as error:
        raise InputError(f"{error}; or name the model's shape with --model") from None


def _folder(model: str) -> str:
    """Folder of the model: the one given, or that of its config.json; for a name, the one that is named after it. A name on
    the hub stays as it is."""
    if name_on_hub(model):
        return model
    if model.lower() in SHAPES or not Path(model).exists():
        return f"models/{Path(model).name.lower()}"
    return str(Path(model).parent if Path(model).is_file() else model)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from None


def simulate_command(
    config: Annotated[str, CONFIG_FILE] = "",
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    gpu: GpuOption = "h100",
    gpus: Annotated[int, typer.Option(min=0, help="number of devices; 0: one per rank, or all cores")] = 0,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="as for `llamarl plan`, if model.path is not on this machine")
    ] = "",
    prompt: PromptOption = 0,
    answer: AnswerOption = "",
    skipped: SkippedOption = 0.0,
    hours: Annotated[float, typer.Option(min=0.0, help="stop after this many virtual hours; 0: at the end")] = 0.0,
    mtbf: Annotated[
        float, typer.Option(min=0.0, help="mean hours between failures of one GPU; 0: nothing fails")
    ] = 0.0,
    restart: Annotated[float, typer.Option(min=0.0, help="seconds until a dead executor is up again")] = 120.0,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the timeline here; ui.perfetto.dev opens it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Rehearse a job: the real controller under a virtual clock, with answers of sampled length."""
    from llamarl.config.file import load_config
    from llamarl.plan.gpus import gpu_named
    from llamarl.plan.lengths import Lengths
    from llamarl.simulate.report import describe_memory, describe_outcome
    from llamarl.simulate.setup import SimulationSetup, make_simulation, shape_of_job
    from llamarl.simulate.simulation import Faults

    settings = [*([config] if "=" in config else []), *(overrides or [])]
    settled = load_config(Path(config) if config and "=" not in config else None, settings)
    limits = settled.generator
    if not limits.replicas:
        raise InputError("generator.replicas: 0 generators cannot be simulated; ask with as many as are to join")
    if prompt > limits.max_prompt_tokens:
        raise InputError(
            f"--prompt {prompt}: the job takes at most generator.max_prompt_tokens={limits.max_prompt_tokens}"
        )
    scene = SimulationSetup(
        config=settled,
        shape=shape_of_job(settled, _shape_asked(settled, model)),
        gpu=gpu_named(gpu),
        gpus=gpus,
        answers=Lengths(answer or f"fixed:{limits.max_new_tokens}"),
        prompt=prompt or limits.max_prompt_tokens,
        skipped=skipped,
        faults=Faults(mtbf_s=3600 * mtbf, restart_s=restart, seed=settled.seed),
        max_s=3600 * hours or float("inf"),
    )
    simulation = make_simulation(scene)
    found, useful = simulation.run(), None
    if timeline is not None:
        _write_timeline(simulation.timeline, timeline, found.wall_s)
    if mtbf:
        undisturbed = make_simulation(msgspec.structs.replace(scene, faults=Faults())).run()
        useful = found.updates / found.wall_s * undisturbed.wall_s / undisturbed.updates
    if as_json:
        figures = {**msgspec.to_builtins(found), "useful_share": useful, "memory_gib": scene.memory_gib}
        print(msgspec.json.encode(figures).decode())
    else:
        print("\n".join(describe_outcome(found, useful)))
        print(describe_memory(scene.memory_gib, scene.gpu.memory_gib))


def _write_timeline(timeline: Timeline, path: Path, end_s: float) -> None:
    try:
        timeline.write(path, 0.0, end_s)
    except OSError as error:
        raise InputError(f"--timeline {path}: cannot be written: {error.strerror}") from None
    print(f"timeline written to {path}", file=sys.stderr)
