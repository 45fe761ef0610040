"""`llamarl bench train`: how fast a model of a given shape trains, with random weights and tokens.

It times whole updates: packing, passes, gradient norm, optimizer step. The head is trained on every token but the first of
each document.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import msgspec
import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from llamarl.algo.batch import IMITATION, Document, Streams
from llamarl.algo.losses import aipo_loss
from llamarl.bench.decode_floor import bench_lora
from llamarl.bench.machine import kernel_times
from llamarl.config import AlgoConfig, LoraConfig, TrainerConfig
from llamarl.config.teacher import THE_TEACHER
from llamarl.errors import InputError
from llamarl.model_spec import ModelSpec, shape_named
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, random_policy
from llamarl.train.speed import datasheet_tflops, measured_tflops, synchronize, training_flops
from llamarl.train.teacher import HostedTeacher, Teachers

WARM_UP = 3
SHORTEST, LONGEST = 64, 2048  # limits of log-normal lengths
Lengths = Literal["equal", "lognormal"]


class TrainBench(Struct, frozen=True, kw_only=True):
    """What is measured: a model, the documents of an update, and the trainer's settings."""

    model: str
    tokens: int = 16_384  # tokens per update
    length: int = 1024  # tokens per document if lengths are equal
    lengths: Lengths = "equal"
    padded: bool = False  # pad every document to the longest, as without packing
    recompute: str = "none"
    offload: bool = False
    compile: bool = True
    tokens_per_pack: int = 0  # 0: an update is one pass
    updates: int = 10
    device: str = "cuda"
    dtype: Literal["bfloat16", "float16"] = "bfloat16"  # precision of the passes on a GPU
    lora: int = 0  # rank of adapters on a frozen model; 0: all weights are trained
    cudnn_from: int = 0  # tokens; documents of at least this length have cuDNN's attention; 0: none
    sft: bool = False  # cross-entropy instead of the policy gradient
    teacher: str = ""  # shape of a teacher whose exact KL is learned beside it; empty: none


class TrainFigures(Struct, frozen=True, kw_only=True):
    """The figures of a training benchmark. Padding is not counted as tokens."""

    model: str
    device: str
    dtype: str
    documents: int
    tokens: int
    update_s: float  # median
    fastest_s: float
    tokens_per_s: float
    tflops: float
    peak_tflops: float  # rate of one large matrix product, measured in this process
    mfu_measured: float
    mfu_datasheet: float | None
    memory_gib: float  # peak of allocated memory
    reserved_gib: float  # peak of memory reserved from the device
    settings: TrainBench


def measure(bench: TrainBench, learner: Learner, documents: Sequence[Document], warm_up: int = WARM_UP) -> TrainFigures:
    """Figures of some updates, after `warm_up` others."""
    numbers = range(WARM_UP - warm_up, WARM_UP + bench.updates)
    times = [time_update(learner, documents, number) for number in numbers]
    return _figures(bench, learner, documents, times[warm_up:])


def prepare(bench: TrainBench, shape: ModelSpec | None = None) -> tuple[Learner, list[Document]]:
    """A learner and its documents; the shape is the one given, or else the one that `bench.model` names."""
    shape, device = shape or shape_named(bench.model), torch.device(bench.device)
    documents = make_documents(shape, bench)
    computing = ComputeSettings(
        device,
        getattr(torch, bench.dtype) if device.type == "cuda" else torch.float32,
        recompute=bench.recompute,
        compiled=bench.compile,
        tokens_per_pack=bench.tokens_per_pack or sum(len(document.tokens) for document in documents),
        lora=bench_lora(shape, bench.lora),
        cudnn_from=bench.cudnn_from,
    )
    learner = Learner(
        random_policy(shape, computing),
        aipo_loss,
        settings=TrainerConfig(offload=bench.offload, lr=1e-6),
        algo=AlgoConfig(),
        updates=1000,
        teachers=_teachers(bench, shape, computing),
    )
    return learner, documents


def _teachers(bench: TrainBench, shape: ModelSpec, computing: ComputeSettings) -> Teachers | None:
    """The teacher, with the policy's vocabulary, on the device all the time."""
    if not bench.teacher:
        return None
    own = replace(shape_named(bench.teacher), vocab_size=shape.vocab_size)
    policy = random_policy(own, dataclasses.replace(computing, lora=LoraConfig(), recompute="none"), seed=1)
    return Teachers({THE_TEACHER: HostedTeacher(policy, offload=False)})


def _streams(bench: TrainBench) -> Streams:
    if bench.sft and bench.teacher:
        raise InputError("--teacher: compares sampled answers, and --sft has none; leave one of them out")
    return IMITATION if bench.sft else Streams(teacher=THE_TEACHER if bench.teacher else "")


def make_documents(shape: ModelSpec, bench: TrainBench) -> list[Document]:
    rng = np.random.default_rng(0)
    lengths = _draw_lengths(bench, rng)
    width = max(lengths)
    streams = _streams(bench)
    documents = [_document(shape, length, width if bench.padded else length, rng) for length in lengths]
    return [dataclasses.replace(document, streams=streams) for document in documents]


def _draw_lengths(bench: TrainBench, rng: np.random.Generator) -> list[int]:
    if bench.lengths == "equal":
        if bench.tokens < bench.length:
            raise InputError(f"--tokens: {bench.tokens} tokens are less than one document of --length {bench.length}")
        return [bench.length] * (bench.tokens // bench.length)
    lengths: list[int] = []
    while (left := bench.tokens - sum(lengths)) >= SHORTEST:
        drawn = int(np.clip(np.exp(rng.normal(np.log(360), 0.9)), SHORTEST, LONGEST))
        lengths.append(min(drawn, left))
    return lengths


def _document(shape: ModelSpec, length: int, width: int, rng: np.random.Generator) -> Document:
    """A random document. Padding is in front, as part of the prompt: it costs the same there and is not trained on."""
    tokens: NDArray[np.int32] = rng.integers(0, shape.vocab_size, width).astype(np.int32)
    return Document(
        tokens=tokens,
        num_prompt_tokens=width - length + 1,
        behavior_logprobs=rng.normal(-np.log(shape.vocab_size), 0.3, length - 1).astype(np.float32),
        staleness=np.ones(length - 1, dtype=np.int64),
        advantages=np.full(length - 1, rng.normal(), dtype=np.float32),
    )


def time_update(
    learner: Learner, documents: Sequence[Document], number: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one update, including its metrics."""
    device = learner.policy.computing.device
    synchronize(device)
    start_s = clock()
    seen = learner.accumulate(documents)
    totals = seen.totals(documents, 4.0)
    outcome = learner.step(number, seen.total_loss())
    totals.metrics()
    synchronize(device)
    elapsed_s = clock() - start_s
    if outcome["skipped"]:
        raise InputError("the update was skipped: loss or gradient is not finite")
    if number == WARM_UP - 1 and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return elapsed_s


def _figures(
    bench: TrainBench, learner: Learner, documents: Sequence[Document], times: Sequence[float]
) -> TrainFigures:
    how, shape = learner.policy.computing, learner.policy.model.shape
    real = [document.num_answer_tokens + 1 for document in documents]
    typical = median(times)
    tflops = training_flops(shape, real, how.lora) / typical / 1e12
    peak, datasheet = measured_tflops(how.device, how.dtype), datasheet_tflops(how.device)
    on_gpu = how.device.type == "cuda"
    return TrainFigures(
        model=bench.model,
        device=torch.cuda.get_device_name(how.device) if on_gpu else "CPU",
        dtype=str(how.dtype).removeprefix("torch."),
        documents=len(documents),
        tokens=sum(real),
        update_s=typical,
        fastest_s=min(times),
        tokens_per_s=sum(real) / typical,
        tflops=tflops,
        peak_tflops=peak,
        mfu_measured=tflops / peak,
        mfu_datasheet=tflops / datasheet if datasheet else None,
        memory_gib=torch.cuda.max_memory_allocated(how.device) / 2**30 if on_gpu else 0.0,
        reserved_gib=torch.cuda.max_memory_reserved(how.device) / 2**30 if on_gpu else 0.0,
        settings=bench,
    )


def profile(learner: Learner, documents: Sequence[Document]) -> str:
    """A table of the longest kernels in one update."""
    return kernel_times(lambda: time_update(learner, documents, WARM_UP))


def describe(found: TrainFigures) -> str:
    datasheet = f", {found.mfu_datasheet:.1%} of the datasheet's" if found.mfu_datasheet is not None else ""
    return (
        f"{found.model} on {found.device}, {found.dtype}: {found.documents} documents, {found.tokens:,} tokens\n"
        f"  update      {found.update_s * 1e3:,.1f} ms (fastest {found.fastest_s * 1e3:,.1f})\n"
        f"  tokens      {found.tokens_per_s:,.0f} per second\n"
        f"  MFU         {found.mfu_measured:.1%} of the measured peak of {found.peak_tflops:.4g} TFLOP/s{datasheet} "
        f"({found.tflops:.4g} TFLOP/s)\n"
        f"  memory      {found.memory_gib:.1f} GiB allocated, {found.reserved_gib:.1f} GiB reserved"
    )


def run(bench: TrainBench, *, as_json: bool, profiled: bool, say: Callable[[str], None] = print) -> None:
    learner, documents = prepare(bench)
    found = measure(bench, learner, documents)
    say(msgspec.json.encode(found).decode() if as_json else describe(found))
    if profiled:
        say(profile(learner, documents))
