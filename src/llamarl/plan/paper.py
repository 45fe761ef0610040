"""Predicts the paper's table. The unpublished facts of its workload are fitted on the 8B row; the other two rows follow.

Synchronous is the paper's baseline as its theorem describes it: one layout of m GPUs for training and generation, which
holds weights, gradients, optimizer and cache together. All answers start together, and the step waits for the longest.
Asynchronous is LlamaRL: each role has the layout that suits it, on its share of the GPUs. Unfinished answers carry over to
the next step, so that no step waits for the longest, and one update's worth of answers is running at all times.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from llamarl.errors import InputError
from llamarl.families.parameters import num_parameters
from llamarl.model_spec import SHAPES, ModelSpec
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import GPUS, DecodeFactors, Gpu, TrainFactors
from llamarl.plan.lengths import Lengths
from llamarl.plan.search import Space
from llamarl.plan.terms import MEMORY_SHARE, copy_s, kv_bytes_per_token, sync_s, weight_bytes
from llamarl.plan.workload import Question, Workload

_HALVINGS = 14
_SPLITS = 16  # number of ways to split the GPUs between trainer and generators
_MEDIANS, _SIGMAS = (20.0, 20_000.0), (0.05, 2.0)


class PaperRow(Struct, frozen=True):
    """One row of the paper's table: times of a step, and of a weight transfer."""

    model: str
    gpus: int
    sync_s: float
    async_s: float
    weights_s: float

    @property
    def shape(self) -> ModelSpec:
        return SHAPES[self.model]

    @property
    def gain(self) -> float:
        return self.sync_s / self.async_s


PUBLISHED = (
    PaperRow("llama-3.1-8b", 256, 22.45, 8.90, 0.04),
    PaperRow("llama-3.1-70b", 256, 82.32, 20.67, 1.15),
    PaperRow("llama-3.1-405b", 1024, 635.8, 59.5, 2.31),
)


class Assumed(Struct, frozen=True, kw_only=True):
    """Facts that are neither published nor fitted. The sensitivity table changes one at a time."""

    answers: int = 2048  # answers per update
    samples: int = 8  # answers per prompt
    prompt: int = 512
    limit: int = 8192  # longest answer, in tokens
    state_bytes: float = 16.0  # training state of the baseline per parameter, on the m GPUs of a copy
    eager_layer_s: float = 0.0  # extra time per layer of a baseline's decode step, without CUDA graphs
    train_factor: float = 1.0  # training time relative to our own trainer
    host_factor: float = 1.0  # factor on the baseline's time for sums between hosts
    precision: str = "bf16"  # precision of the baseline's weights when it generates
    async_precision: str = "bf16"  # precision of LlamaRL's generators; fp8 if that does not fit
    gpu: Gpu = GPUS["h100"]


class Predicted(Struct, frozen=True):
    """Prediction of one row: step times and the layouts that reach them."""

    row: PaperRow
    sync_s: float
    async_s: float
    m: int  # GPUs per copy of the baseline
    theta: float  # share of the GPUs that train
    generator: str

    @property
    def gain(self) -> float:
        return self.sync_s / self.async_s


def predict_row(row: PaperRow, answers: Lengths, assumed: Assumed) -> Predicted:
    """The best synchronous and the best asynchronous step for one row."""
    sync, m = min(_sync_options(row, answers, assumed))
    split_s, theta, generator = min(_async_options(row, answers, assumed))
    return Predicted(row, sync, split_s, m, theta, generator)


def _question(row: PaperRow, answers: Lengths, assumed: Assumed) -> Question:
    groups = assumed.answers // assumed.samples
    shape = replace(row.shape, max_positions=1 << 20)
    train = assumed.gpu.train
    slower: TrainFactors = replace(train, products=train.products * assumed.train_factor)
    work = Workload(groups=groups, samples=assumed.samples, prompt=assumed.prompt, answers=answers, share_prompts=False)
    return Question(shape=shape, gpu=replace(assumed.gpu, train=slower), gpus=row.gpus, work=work)


def _sync_options(row: PaperRow, answers: Lengths, assumed: Assumed) -> Iterator[tuple[float, int]]:
    """Yield (seconds, m) for every m that fits. Training is as fast as our own trainer on all GPUs."""
    question = _question(row, answers, assumed)
    train_s = _train_s(question, row.gpus)
    gpu = _baseline_gpu(assumed)
    for m in (2**power for power in range(11) if 2**power <= row.gpus):
        count = assumed.answers * m / row.gpus
        shape, slots = question.shape, max(1, round(count))
        cache = count * kv_bytes_per_token(shape, assumed.precision) * (assumed.prompt / assumed.samples + answers.mean)
        held = assumed.state_bytes * num_parameters(shape) + weight_bytes(shape, assumed.precision) + cache
        if held / m > gpu.memory_bytes * MEMORY_SHARE:
            continue
        replica = Replica(shape, gpu, assumed.precision, m, slots, assumed.prompt, assumed.prompt + answers.longest)
        generate_s = replica.drain_s(count, assumed.answers, assumed.samples, answers)
        yield generate_s + train_s + 2 * copy_s(gpu, weight_bytes(shape, assumed.precision) / m), m


def _baseline_gpu(assumed: Assumed) -> Gpu:
    decode: DecodeFactors = assumed.gpu.decode
    slower = replace(decode, layer_s=decode.layer_s + assumed.eager_layer_s)
    return replace(assumed.gpu, decode=slower, host_hops=assumed.host_factor)


def _async_options(row: PaperRow, answers: Lengths, assumed: Assumed) -> Iterator[tuple[float, float, str]]:
    """Yield (seconds, theta, generator layout) for every split of the GPUs."""
    question = _question(row, answers, assumed)
    for train_gpus in range(row.gpus // _SPLITS, row.gpus, row.gpus // _SPLITS):
        generate_gpus = row.gpus - train_gpus
        train_s = _train_s(question, train_gpus)
        for tp in question.tensor_sizes():
            if (precision := _precision(question, tp, assumed)) and generate_gpus >= tp:
                replicas = generate_gpus // tp
                active = assumed.answers / replicas
                replica = Replica(
                    question.shape, assumed.gpu, precision, tp, max(1, round(active)), assumed.prompt, answers.longest
                )
                generate_s = (answers.mean + replica.late_steps) * replica.steady_step_s(active, answers)
                weights_s = sync_s(question.shape, assumed.gpu, precision, train_gpus, replicas * tp, tp)
                yield max(train_s, generate_s) + weights_s, train_gpus / row.gpus, f"TP {tp} {precision}"


def _precision(question: Question, tp: int, assumed: Assumed) -> str:
    """The widest precision in which the weights take at most 3/4 of the memory; empty if none does."""
    room = question.memory_bytes * 0.75 * tp
    return next((name for name in (assumed.async_precision, "fp8") if weight_bytes(question.shape, name) <= room), "")


def _train_s(question: Question, gpus: int) -> float:
    """Update time of the fastest layout that fits, with the states sharded over all ranks."""
    space = Space(question)
    fitting = [one.update_s for one in space.trainers(gpus)]
    return min(fitting, default=float("inf"))


def fit_answers(assumed: Assumed) -> Lengths:
    """The distribution of lengths at which both predicted times of the 8B row are as published."""
    row = PUBLISHED[0]
    low, high = _SIGMAS
    for _ in range(_HALVINGS):
        sigma = (low + high) / 2
        answers = _with_async_s(row, sigma, assumed)
        sync, _ = min(_sync_options(row, answers, assumed))
        low, high = (sigma, high) if sync < row.sync_s else (low, sigma)
    if min(high - _SIGMAS[0], _SIGMAS[1] - low) < 1e-3:
        raise InputError("paper: no spread of lengths explains the 8B row under these assumptions")
    return answers


def _with_async_s(row: PaperRow, sigma: float, assumed: Assumed) -> Lengths:
    low, high = _MEDIANS
    for _ in range(_HALVINGS):
        median = (low * high) ** 0.5
        answers = Lengths(f"lognormal:median={median:.5g},sigma={sigma:.5g},max={assumed.limit}")
        found_s = min(_async_options(row, answers, assumed))[0]
        low, high = (median, high) if found_s < row.async_s else (low, median)
    return answers
