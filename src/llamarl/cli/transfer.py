"""`llamarl plan-transfer`, and the options it shares with `llamarl bench sync`. Does not import torch."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

ModelOption = Annotated[str, typer.Option(metavar="SHAPE", help="a model shape by name")]
TrainerOption = Annotated[str, typer.Option(metavar="MESH", help="such as fsdp=4,tp=2 (or replicas=2,precision=fp32)")]
GeneratorOption = Annotated[str, typer.Option(metavar="MESH", help="such as tp=2,replicas=2,precision=fp8")]


def plan_transfer_command(
    model: ModelOption = "llama-3.1-8b",
    trainer: TrainerOption = "fsdp=8",
    generator: GeneratorOption = "replicas=8",
    nvlink: Annotated[float, typer.Option(min=0.001, help="GB/s per GPU and direction inside a host")] = 450.0,
    nic: Annotated[float, typer.Option(min=0.001, help="GB/s per GPU and direction between hosts")] = 50.0,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs of one host")] = 8,
    together: Annotated[
        bool,
        typer.Option("--together", help="place generators on the trainers' hosts, after them, not on their own"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Show what is sent where when weights are published, and how long it would take, for any number of GPUs."""
    from llamarl.layout.cost import Links, describe, predict
    from llamarl.layout.mesh import parse_side
    from llamarl.layout.model import model_plan
    from llamarl.model_spec import shape_named

    sides = parse_side("--trainer", trainer, "bf16"), parse_side("--generator", generator, "bf16")
    plan = model_plan(shape_named(model), *sides)
    links = Links(nvlink_gb_s=nvlink, nic_gb_s=nic, gpus_per_host=gpus_per_host, together=together)
    found = predict(plan, links)
    print(msgspec.json.encode(found).decode() if as_json else describe(plan, found))
