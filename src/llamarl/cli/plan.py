"""`llamarl plan` and `llamarl simulate`: what a job will take, before it is paid for. No torch here, and no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from llamarl.errors import InputError

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
PromptOption = Annotated[int, typer.Option(min=0, help="tokens of a prompt; 0: as many as it may have")]


def simulate_command(
    config: Annotated[str, typer.Argument(metavar="[CONFIG]", help="a YAML file; without it, the default job")] = "",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="settings that replace the file's")
    ] = None,
    gpu: GpuOption = "h100",
    gpus: Annotated[int, typer.Option(min=0, help="devices there are; 0: one for each rank, or all cores")] = 0,
    model: Annotated[
        str, typer.Option(metavar="SHAPE", help="a shape by name, where model.path is not here to be read")
    ] = "",
    prompt: PromptOption = 0,
    answer: AnswerOption = "",
    skipped: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="share of groups whose rewards are all equal: not trained on")
    ] = 0.0,
    hours: Annotated[float, typer.Option(min=0.0, help="stop after so many virtual hours; 0: at the end")] = 0.0,
    mtbf: Annotated[
        float, typer.Option(min=0.0, help="hours between failures of one GPU, on average; 0: nothing fails")
    ] = 0.0,
    restart: Annotated[float, typer.Option(min=0.0, help="seconds until a dead executor is up again")] = 120.0,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the timeline here; ui.perfetto.dev opens it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Rehearse a job: the real controller under a virtual clock, with answers of sampled length."""
    from llamarl.configfile import load_config
    from llamarl.plan.gpus import gpu_named
    from llamarl.plan.lengths import Lengths
    from llamarl.simulate.report import describe_outcome
    from llamarl.simulate.scene import Scene, make_simulation, shape_of_job
    from llamarl.simulate.simulation import Faults

    settings = [*([config] if "=" in config else []), *(overrides or [])]
    settled = load_config(Path(config) if config and "=" not in config else None, settings)
    limits = settled.generator
    scene = Scene(
        config=settled,
        shape=shape_of_job(settled, model),
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
        print(msgspec.json.encode({**msgspec.to_builtins(found), "useful_share": useful}).decode())
    else:
        print("\n".join(describe_outcome(found, useful)))


def _write_timeline(timeline: object, path: Path, end_s: float) -> None:
    from llamarl.observe.timeline import Timeline

    assert isinstance(timeline, Timeline)
    try:
        timeline.write(path, 0.0, end_s)
    except OSError as error:
        raise InputError(f"--timeline {path}: cannot be written: {error.strerror}") from None
    print(f"timeline written to {path}", file=sys.stderr)
