"""`llamarl bench`: commands that measure the parts. torch is imported only when one of them runs."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from llamarl.cli.devices import DeviceOption, device_or_refuse
from llamarl.cli.help_format import Commands
from llamarl.cli.transfer import GeneratorOption, ModelOption, TrainerOption
from llamarl.errors import InputError

bench = Commands(help="Measure the parts on this machine.", invoke_without_command=True, add_completion=False)


class Recompute(StrEnum):
    none = "none"
    selective = "selective"
    offload = "offload"
    full = "full"


class TransportChoice(StrEnum):
    auto = "auto"
    memfd = "memfd"
    cuda = "cuda"
    group = "group"


class PrecisionOption(StrEnum):
    bf16 = "bf16"
    fp32 = "fp32"
    fp8 = "fp8"
    int8 = "int8"


class Passes(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"


class KVCache(StrEnum):
    auto = "auto"
    fp8 = "fp8"


class MeasuredBy(StrEnum):
    auto = "auto"
    windows = "windows"
    whole = "whole"


@bench.callback()
def bench_itself(
    context: typer.Context,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="describe this machine, for `llamarl plan` and `simulate` --gpu FILE")
    ] = False,
    device: Annotated[
        str, typer.Option(help="--calibrate: auto (a GPU if there is one), cpu, cuda or cuda:N")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="--calibrate: CPU threads of an executor; 0: all cores")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="--calibrate: where the description goes; default: stdout")
    ] = None,
) -> None:
    if context.invoked_subcommand is None:
        if not calibrate:
            print(context.get_help())
            return
        _calibrate(device, threads, json)
    elif calibrate:
        raise InputError("--calibrate: stands alone; leave out the command behind it")


def _calibrate(device: str, threads: int, file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise InputError(f"--json {file}: there is no folder {file.parent}")
    import torch

    from llamarl.bench.calibrate import calibrate, describe_calibration
    from llamarl.plan.gpus import gpu_to_json

    settled = torch.device(device_or_refuse(device))
    torch.set_num_threads(threads or os.cpu_count() or 1)
    found = calibrate(settled, torch.get_num_threads())
    described = gpu_to_json(found.gpu)
    if file is None:
        print(described.decode(), end="")
        return
    file.write_bytes(described)
    print("\n".join([*describe_calibration(found), f"written to {file}"]))


@bench.command("train")
def bench_train_command(
    model: Annotated[str, typer.Option(metavar="SHAPE", help="a shape by name, such as llama-3.2-1b")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=64, help="tokens of one update")] = 16_384,
    length: Annotated[int, typer.Option(min=2, help="tokens of each document")] = 1024,
    lognormal: Annotated[bool, typer.Option("--lognormal", help="log-normal lengths from 64 to 2048 instead")] = False,
    padded: Annotated[
        bool, typer.Option("--padded", help="fill documents up to the longest, as without packing")
    ] = False,
    tokens_per_pack: Annotated[int, typer.Option(min=0, help="tokens of one pass; 0: all")] = 0,
    recompute: Annotated[Recompute, typer.Option(help="activations recomputed in the backward pass")] = Recompute.none,
    offload: Annotated[bool, typer.Option("--offload", help="optimizer state in host memory")] = False,
    dtype: Annotated[Passes, typer.Option(help="precision of the passes on a GPU")] = Passes.bfloat16,
    eager: Annotated[bool, typer.Option("--eager", help="do not compile")] = False,
    updates: Annotated[int, typer.Option(min=1, help="updates that are timed")] = 10,
    lora: Annotated[
        int, typer.Option(metavar="RANK", min=0, help="train adapters of this rank on a frozen model; 0: none")
    ] = 0,
    sft: Annotated[
        bool, typer.Option("--sft", help="cross-entropy, as `llamarl sft` trains, instead of the policy gradient")
    ] = False,
    teacher: Annotated[
        str, typer.Option(metavar="SHAPE", help="learn the exact KL to a teacher of this shape beside it")
    ] = "",
    device: DeviceOption = "auto",
    profile: Annotated[bool, typer.Option("--profile", help="also show the longest kernels of one update")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Measure how fast a model of this shape trains: whole updates with random weights and tokens."""
    settled = device_or_refuse(device)
    from llamarl.bench.train import TrainBench, run

    bench = TrainBench(
        model=model,
        tokens=tokens,
        length=length,
        lengths="lognormal" if lognormal else "equal",
        padded=padded,
        tokens_per_pack=tokens_per_pack,
        recompute=recompute.value,
        offload=offload,
        compile=not eager,
        updates=updates,
        device=settled,
        dtype=dtype.value,
        lora=lora,
        sft=sft,
        teacher=teacher,
    )
    run(bench, as_json=json, profiled=profile)


@bench.command("decode")
def bench_decode_command(
    model: Annotated[str, typer.Option(help="a shape by name, with random weights")] = "llama-3.2-1b",
    batch: Annotated[int, typer.Option(min=1, help="sequences at once")] = 256,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 128,
    new: Annotated[int, typer.Option(min=16, help="tokens to sample for each")] = 256,
    samples: Annotated[int, typer.Option(min=1, help="completions of each prompt")] = 8,
    precision: Annotated[
        PrecisionOption, typer.Option(help="precision of the weights; fp8 and int8 quantize bf16")
    ] = PrecisionOption.bf16,
    kv_cache: Annotated[
        KVCache, typer.Option(help="precision of keys and values; auto: as the weights, but at least bf16")
    ] = KVCache.auto,
    burst: Annotated[
        int, typer.Option(min=0, help="decode steps between two checks of the results; 0: as in a job")
    ] = 0,
    lora: Annotated[
        int, typer.Option(metavar="RANK", min=0, help="adapters of this rank beside all layers; 0: none")
    ] = 0,
    beside: Annotated[
        int,
        typer.Option(min=0, help="prompt tokens that a step reads beside its answers, with up to 128 slots; 0: none"),
    ] = 0,
    by: Annotated[
        MeasuredBy,
        typer.Option(
            help="whole: run everything to its end, however long; windows: parts of it, and heavy tails as they are long "
            "after the start; auto: whole runs if they are quick"
        ),
    ] = MeasuredBy.auto,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="instead of figures: where the time of a few bursts goes")
    ] = False,
) -> None:
    """Measure how fast completions are sampled, compared with the machine's limit."""
    from llamarl.model_spec import shape_named

    shape = shape_named(model)
    if prompt + new > shape.max_positions:
        raise InputError(f"--new: {prompt} + {new} tokens exceed the {shape.max_positions} positions of {model}")
    from llamarl.bench.decode import bench_decode, describe_decode, profile_decode
    from llamarl.bench.decode_case import DecodeCase

    where = device_or_refuse(device)
    case = DecodeCase(
        model, batch, prompt, new, samples, precision.value, where, kv_cache.value, burst, lora=lora, beside=beside
    )
    if profile:
        print(profile_decode(shape, case))
        return
    result = bench_decode(shape, case, by=by.value)
    print(msgspec.json.encode(result).decode() if as_json else describe_decode(result))


@bench.command("serve")
def bench_serve_command(
    model: Annotated[
        str, typer.Option(help="a shape by name, with random weights, or a model folder, or 'tiny'")
    ] = "llama-3.2-1b",
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 256,
    requests: Annotated[int, typer.Option(min=1, help="requests that are timed")] = 1024,
    prompt: Annotated[int, typer.Option(min=20, help="tokens of each prompt")] = 128,
    new: Annotated[int, typer.Option(min=1, help="longest answer")] = 256,
    slots: Annotated[int, typer.Option(min=0, help="answers sampled at once; 0: as many as requests")] = 0,
    stream: Annotated[bool, typer.Option("--stream", help="stream the answers")] = False,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Measure what HTTP costs: throughput and first token of `llamarl serve`, compared with the decoder alone."""
    from llamarl.config.job import SHIPPED_MODELS
    from llamarl.model_spec import shape_named

    shape = None if model in SHIPPED_MODELS or Path(model).is_dir() else shape_named(model)
    where = device_or_refuse(device)
    from llamarl.bench.serve import ServeCase, bench_serve, describe_serve

    case = ServeCase(
        model=model,
        concurrency=concurrency,
        requests=requests,
        prompt=prompt,
        new=new,
        device=where,
        slots=slots,
        stream=stream,
    )
    result = bench_serve(case, shape)
    print(msgspec.json.encode(result).decode() if as_json else describe_serve(result))


@bench.command("sync")
def bench_sync_command(
    model: ModelOption = "",
    trainer: TrainerOption = "",
    generator: GeneratorOption = "",
    lora: Annotated[
        int,
        typer.Option(
            metavar="RANK", min=0, help="send adapters of this rank, with their hash, not all weights; 0: none"
        ),
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds, of which the median is printed")] = 50,
    transport: Annotated[
        TransportChoice, typer.Option(help="auto: as a job would choose on this machine")
    ] = TransportChoice.auto,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Measure how long weights take from trainer to generator, between real processes on this machine."""
    from llamarl.layout.mesh import parse_side
    from llamarl.model_spec import shape_named

    sides = parse_side("--trainer", trainer, "fp32" if lora else "bf16"), parse_side("--generator", generator, "bf16")
    named = shape_named(model) if model else None

    from llamarl.bench.sync import SyncCase, bench_sync, default_model, describe_sync

    model = model or default_model()
    case = SyncCase(model, trainer, generator, rounds, transport.value, lora)
    result = bench_sync(named or shape_named(model), *sides, case)
    print(msgspec.json.encode(result).decode() if as_json else describe_sync(result))
