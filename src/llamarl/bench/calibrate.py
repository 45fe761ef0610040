"""`llamarl bench --calibrate`: measures this machine and writes the description that plan and simulate read.

It first measures the hardware's best: a large product and a large copy. Then it times our generator and trainer on a few
small models with random weights, and fits the factors that say how much of the hardware they reach. It takes about a minute.
On a CPU with one thread it measures CPU time, so that other programs on the machine do not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from msgspec import Struct
from msgspec.structs import replace

from llamarl.bench.decode import DecodeBench
from llamarl.bench.decode_case import PRECISIONS, DecodeCase
from llamarl.bench.machine import Ceilings, Clock, measure_ceilings
from llamarl.bench.train import TrainBench, prepare, time_update
from llamarl.config import GeneratorConfig
from llamarl.engine.malloc import keep_freed_memory
from llamarl.machine import GIB
from llamarl.model_spec import ModelSpec, shape_named
from llamarl.plan.fit import Measured, fit_factors
from llamarl.plan.generator import Replica, cached_on_cpu
from llamarl.plan.gpus import GPUS, DecodeFactors, EngineFactors, Gpu, TrainFactors
from llamarl.plan.terms import decode_terms, total_s, train_terms
from llamarl.plan.trainer import packed

_FP8_CAPABILITY = (8, 9)  # first GPUs with fp8 products
_FP8_POINT = 1  # decode point that is also measured with fp8 weights
_REPEATS = 3  # the median counts, not the minimum: jobs are disturbed as much as measurements


class DecodePoint(Struct, frozen=True):
    """A decode measurement: `rows` sequences with `prompt` and `new` tokens each."""

    shape: ModelSpec
    rows: int
    prompt: int
    new: int


class TrainPoint(Struct, frozen=True):
    """A training measurement: an update on `documents` documents of equal length."""

    shape: ModelSpec
    documents: int
    length: int


class CalibrationRow(Struct, frozen=True):
    """One measured time, and the time that the fitted description predicts."""

    what: str
    measured_s: float
    described_s: float

    @property
    def error(self) -> float:
        return self.described_s / self.measured_s - 1


class Calibration(Struct, frozen=True):
    """The fitted description of a machine, with the measurements behind it."""

    gpu: Gpu
    rows: tuple[CalibrationRow, ...]


def _small(hidden: int, layers: int, vocab: int) -> ModelSpec:
    """A model small enough to be trained quickly on a CPU."""
    return ModelSpec(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 13 // 4,
        num_layers=layers,
        num_heads=hidden // 32,
        num_kv_heads=hidden // 64,
        head_dim=32,
        max_positions=4096,
        tied_head=True,
    )


def _decode_points(on_gpu: bool) -> list[DecodePoint]:
    if on_gpu:
        one, half = shape_named("llama-3.2-1b"), shape_named("qwen2.5-0.5b")
        return [
            DecodePoint(one, 32, 64, 96),
            DecodePoint(one, 256, 64, 96),
            DecodePoint(one, 256, 768, 96),
            DecodePoint(half, 64, 64, 96),
            DecodePoint(half, 512, 64, 96),
            DecodePoint(half, 512, 512, 96),
        ]
    small, wide = _small(128, 5, 17), _small(384, 8, 2048)
    return [
        DecodePoint(small, 768, 32, 8),
        DecodePoint(small, 64, 32, 16),
        DecodePoint(small, 128, 112, 16),
        DecodePoint(wide, 64, 32, 16),
        DecodePoint(wide, 16, 112, 16),
    ]


def _train_points(on_gpu: bool) -> list[TrainPoint]:
    if on_gpu:
        one, half = shape_named("llama-3.2-1b"), shape_named("qwen2.5-0.5b")
        # Only a few points, since compiling takes most of the time.
        return [TrainPoint(half, 32, 512), TrainPoint(one, 16, 1024), TrainPoint(one, 4, 4096)]
    small, wide = _small(128, 5, 17), _small(384, 8, 2048)
    return [
        TrainPoint(small, 768, 10),
        TrainPoint(small, 64, 10),
        TrainPoint(small, 48, 128),
        TrainPoint(wide, 32, 16),
        TrainPoint(wide, 4, 128),
    ]


def _samples(on_gpu: bool) -> int:
    """Answers per prompt. On a GPU, shared prompts would be read from its cache; so none are shared there, since in a job
    most of the reads are of answers."""
    return 1 if on_gpu else 8


def calibrate(device: torch.device, threads: int) -> Calibration:
    """Measure this machine. The caller has set the number of threads; memory is handled as in an executor."""
    keep_freed_memory()
    on_gpu = device.type == "cuda"
    precision = "bf16" if on_gpu else "fp32"
    clock = time.perf_counter if on_gpu or threads > 1 else time.process_time
    bare = _bare(device, threads, precision, measure_ceilings(device, PRECISIONS[precision], clock))
    points = _decode_points(on_gpu)
    measured = [_measure_decode(bare, precision, device, point, clock) for point in points]
    decode = [step for step, _ in measured]
    if on_gpu:
        torch.cuda.empty_cache()
    train = [_measure_train(bare, precision, device, point, clock) for point in _train_points(on_gpu)]
    fitted = (fit_factors(bare.decode, decode), fit_factors(bare.train, train))
    rows = [_row(one, fitted[0]) for one in decode] + [_row(one, fitted[1]) for one in train]
    gpu = replace(bare, decode=fitted[0], train=fitted[1], source="measured")
    if on_gpu and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        gpu, row = _with_fp8(gpu, device, points[_FP8_POINT], clock)
        rows.append(row)
    prefill = _prefill_factor(gpu, precision, points, [read_s for _, read_s in measured])
    return Calibration(replace(gpu, decode=replace(gpu.decode, prefill=prefill)), tuple(rows))


def _with_fp8(gpu: Gpu, device: torch.device, point: DecodePoint, clock: Clock) -> tuple[Gpu, CalibrationRow]:
    """The machine with the rate of fp8 products, and with what fp8 weights add to every layer of a small model."""
    best = measure_ceilings(device, PRECISIONS["fp8"], clock)
    gpu = replace(gpu, tflops=replace(gpu.tflops, fp8=best.flops / gpu.product_share / 1e12))
    step, _ = _measure_decode(gpu, "fp8", device, point, clock)
    gpu = replace(gpu, decode=replace(gpu.decode, narrow_s=narrow_s(gpu, point.shape, step)))
    return gpu, _row(Measured(f"fp8: {step.what}", step.seconds, step.terms), gpu.decode)


def narrow_s(gpu: Gpu, shape: ModelSpec, step: Measured) -> float:
    """Seconds per layer that a step with fp8 weights takes longer than its products, which are half as many bytes."""
    return max(0.0, step.seconds - total_s(replace(gpu.decode, narrow_s=0.0), step.terms)) / shape.num_layers


def _row(one: Measured, factors: DecodeFactors | TrainFactors) -> CalibrationRow:
    return CalibrationRow(one.what, one.seconds, total_s(factors, one.terms))


def uncalibrated(device: torch.device, threads: int) -> Gpu:
    """This machine by its measured limits, which takes seconds, with factors that were measured elsewhere."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    return replace(_bare(device, threads, precision, measure_ceilings(device, PRECISIONS[precision])), source="limits")


def _bare(device: torch.device, threads: int, precision: str, found: Ceilings) -> Gpu:
    """The measured hardware with the stated factors, and with the links of the same GPU's datasheet."""
    if device.type == "cpu":
        cores = os.cpu_count() or 1
        return replace(
            found.as_gpu(f"CPU with {cores} cores", precision),
            memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
            cores=cores,
            threads=threads,
            decode=DecodeFactors(products=2.0, cache=2.0, traffic=3.0, layer_s=500e-6, step_s=1e-3, row_s=10e-6),
            train=TrainFactors(layer_s=1e-3),
            engine=EngineFactors(copy=1.4, copy_s=1e-3),
        )
    name = torch.cuda.get_device_name(device)
    sheet = next((gpu for gpu in GPUS.values() if gpu.name in name.lower()), GPUS["h100"])
    return replace(
        found.as_gpu(name, precision),
        memory_gib=torch.cuda.get_device_properties(device).total_memory / GIB,
        nvlink_gb_s=sheet.nvlink_gb_s,
        nic_gb_s=sheet.nic_gb_s,
    )


def _measure_decode(
    gpu: Gpu, precision: str, device: torch.device, point: DecodePoint, clock: Clock
) -> tuple[Measured, float]:
    """Measure a step with all slots busy and half-grown answers in the cache; also the time to read all prompts."""
    case = DecodeCase("", point.rows, point.prompt, point.new, _samples(not gpu.is_cpu), precision, str(device))
    bench = DecodeBench(point.shape, case, longest=point.new, clock=clock)
    steady = [point.new] * point.rows
    bench.run(steady)  # a first run, to capture graphs and compile kernels
    runs = [bench.run(steady) for _ in range(_REPEATS)]
    burst = bench.decoder.burst_steps
    step_s = median(busy_s for _, busy_s in runs) / (point.new - burst)
    read_s = median(whole_s - busy_s for whole_s, busy_s in runs) - burst * step_s  # time before the first burst
    cached = point.rows * (point.prompt + point.new / 2)
    if gpu.is_cpu:
        cached = cached_on_cpu(point.rows, point.prompt + point.new, GeneratorConfig().page_tokens)
    terms = decode_terms(point.shape, gpu, precision, point.rows, cached)
    what = f"decode step, {_name(point.shape)}, {point.rows} x ({point.prompt} + {point.new})"
    return Measured(what, step_s, terms), read_s


def _prefill_factor(gpu: Gpu, precision: str, points: Sequence[DecodePoint], read_s: Sequence[float]) -> float:
    """Ratio of the measured to the predicted time of reading prompts, over all points."""
    described_s = 0.0
    for point in points:
        replica = Replica(point.shape, gpu, precision, 1, point.rows, point.prompt, point.prompt + point.new)
        described_s += replica.prefill_s(point.rows // _samples(not gpu.is_cpu))
    return min(10.0, max(0.1, sum(read_s) / described_s))


def _measure_train(gpu: Gpu, precision: str, device: torch.device, point: TrainPoint, clock: Clock) -> Measured:
    bench = TrainBench(
        model="", tokens=point.documents * point.length, length=point.length, compile=not gpu.is_cpu, device=str(device)
    )
    learner, documents = prepare(bench, point.shape)
    times = [time_update(learner, documents, number, clock) for number in range(2 + _REPEATS)][2:]
    shaped = packed(gpu, [point.length] * point.documents, answer_share=1 - 1 / point.length)
    terms = train_terms(
        point.shape,
        gpu,
        precision,
        tokens=shaped.tokens,
        answer_tokens=shaped.answer_tokens,
        squares=shaped.squares,
        passes=1,
    )
    return Measured(f"update, {_name(point.shape)}, {point.documents} x {point.length}", median(times), terms)


def _name(shape: ModelSpec) -> str:
    return f"{shape.num_layers} layers of {shape.hidden_size}"


def describe_calibration(found: Calibration) -> Iterator[str]:
    """Yield the lines of a report on a calibration."""
    gpu = found.gpu
    rate = ", ".join(f"{precision} {gpu.flops(precision) / 1e12:,.4g} TFLOP/s" for precision in gpu.precisions)
    yield f"{gpu.name}: {gpu.memory_gib:.1f} GiB, {rate}, {gpu.memory_gb_s:,.0f} GB/s"
    for row in found.rows:
        shown = f"{row.measured_s * 1e3:10.2f} ms, described as {row.described_s * 1e3:.2f} ({row.error:+.0%})"
        yield f"  {row.what:<54} {shown}"
    for side, factors in (("decode", gpu.decode), ("train", gpu.train)):
        shown = ", ".join(f"{name} {getattr(factors, name):.3g}" for name in factors.__struct_fields__)
        yield f"  {side}: {shown}"
