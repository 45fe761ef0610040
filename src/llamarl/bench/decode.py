"""`llamarl bench decode`: how fast the generator samples, and how close that is to the machine's limit."""

from __future__ import annotations

import math
import random
import statistics
import time
from functools import partial
from typing import Literal

import torch
from msgspec import Struct

from llamarl.bench.machine import (
    Ceilings,
    Clock,
    kernel_times,
    measure_ceilings,
    peak_memory_bytes,
    process_age_s,
)
from llamarl.config import LoraConfig
from llamarl.families.adapters import num_adapter_parameters
from llamarl.generate.decoder import ContinuousDecoder, Limits, Precision
from llamarl.model.checkpoint import random_model
from llamarl.model.lora import Adapters, serve_adapters
from llamarl.model.quantize import FP8, Quantization
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec
from llamarl.plan.terms import layer_products
from llamarl.train.speed import synchronize
from llamarl.types import Problem, PromptGroup, Sampling, tokens_to_bytes

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}  # dtypes of the weights
_OPERANDS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": FP8,
    "int8": torch.bfloat16,
}  # dtypes of the products
_LONGEST = 10  # heavy tail: the longest answer, in medians
_SPREAD = 0.8  # heavy tail: standard deviation of the logarithm of the lengths
_ROUNDS = 6  # heavy tail: sequences per slot
_PROFILED_STEPS = 24


class DecodeCase(Struct, frozen=True):
    """What is measured: `batch` sequences with `prompt` and `new` tokens each."""

    model: str
    batch: int
    prompt: int
    new: int
    samples: int  # completions per prompt
    precision: str
    device: str
    kv_cache: Literal["auto", "fp8"] = "auto"
    burst: int = 0
    page_tokens: int = 16
    lora: int = 0  # rank of adapters beside all layers; 0: none

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters, and of everything that is not quantized."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def narrow(self) -> Precision:
        weights: Quantization = "fp8" if self.precision == "fp8" else "int8" if self.precision == "int8" else "none"
        return Precision(weights=weights, kv_cache=self.kv_cache, keep_wide=not self.lora)

    @property
    def median(self) -> int:
        """Median of the heavy-tailed lengths, whose mean is then about `new`."""
        return max(1, round(self.new / math.exp(_SPREAD**2 / 2)))


class DecodeResult(Struct, frozen=True):
    """The figures of a decode benchmark."""

    case: DecodeCase
    first_token_s: float  # time from the start of the process to the first token
    tokens_per_s: float  # rate with all slots busy, from the end of the first burst
    tokens_per_s_with_prefill: float
    floor_tokens_per_s: float  # highest rate that the machine allows
    share_of_floor: float
    heavy_tailed_tokens_per_s: float  # rate with continuous refill, while sequences are waiting
    heavy_tailed_share: float
    weight_change_lost_s: float  # time lost by new weights in the middle of a run
    burst_s: float
    peak_memory_bytes: int
    ceilings: Ceilings


def profile_decode(shape: ModelSpec, case: DecodeCase) -> str:
    """Tables of the longest kernels in a few bursts and in a run with heavy-tailed lengths."""
    bench = DecodeBench(shape, case)
    bench.run([case.new] * case.batch)
    steady = kernel_times(lambda: bench.run([_PROFILED_STEPS] * case.batch))
    lengths = bench.heavy_tailed_lengths()
    bench.refilled(lengths)
    bench.drain()
    heavy = kernel_times(lambda: bench.refilled(lengths))
    return f"{steady}\n\nheavy-tailed lengths:\n{heavy}"


def _decoder_of(shape: ModelSpec, case: DecodeCase, longest: int) -> ContinuousDecoder:
    model = random_model(shape, dtype=case.dtype, device=torch.device(case.device))
    limits = Limits(
        slots=case.batch,
        max_prompt_tokens=case.prompt,
        max_new_tokens=longest,
        burst=case.burst,
        page_tokens=case.page_tokens,
    )
    decoder = ContinuousDecoder(
        model,
        limits,
        eos_ids=(),
        seed=0,
        precision=case.narrow,
        add_adapters=partial(random_adapters, rank=case.lora) if case.lora else None,
    )
    decoder.version = 0
    return decoder


def random_adapters(model: Transformer, rank: int) -> Adapters:
    """Adapters beside all layers, of which neither A nor B is zero."""
    adapters = serve_adapters(model, LoraConfig(rank=rank), lambda parameter: parameter.shape)
    with torch.no_grad():
        for one in adapters.applied():
            one.a.normal_(0.0, 0.02)
            one.b.normal_(0.0, 0.02)
    return adapters


def bench_decode(shape: ModelSpec, case: DecodeCase) -> DecodeResult:
    """Measure how fast a model of this shape generates."""
    device, bench = torch.device(case.device), DecodeBench(shape, case)
    decoder = bench.decoder
    bench.run([1] * case.samples)
    first_token_s = process_age_s()
    steady = [case.new] * case.batch
    bench.run(steady)  # a first run, to capture the graphs
    whole_s, busy_s = bench.run(steady)
    changed_s, _ = bench.run(steady, change_weights=True)
    rate = bench.rate(busy_s)
    heavy = bench.heavy_tailed()
    ceilings = measure_ceilings(device, _OPERANDS[case.precision] if device.type == "cuda" else case.dtype)
    floor = case.batch / floor_s(shape, case, ceilings)
    return DecodeResult(
        case=case,
        first_token_s=first_token_s,
        tokens_per_s=rate,
        tokens_per_s_with_prefill=case.batch * case.new / whole_s,
        floor_tokens_per_s=floor,
        share_of_floor=rate / floor,
        heavy_tailed_tokens_per_s=heavy,
        heavy_tailed_share=heavy / rate,
        weight_change_lost_s=changed_s - whole_s,
        burst_s=decoder.burst_steps * case.batch / rate,
        peak_memory_bytes=bench.peak_bytes,
        ceilings=ceilings,
    )


class DecodeBench:
    """A decoder with random weights and answers of known length. `longest` is the longest answer; 0: as in the heavy
    tail."""

    def __init__(self, shape: ModelSpec, case: DecodeCase, longest: int = 0, clock: Clock = time.perf_counter) -> None:
        self._shape, self._case, self._device, self._clock = shape, case, torch.device(case.device), clock
        self.decoder = _decoder_of(shape, case, longest or max(case.new, _LONGEST * case.median))
        self._ordinal, self._chance = 0, random.Random(0)
        self.peak_bytes = 0

    def _add(self, lengths: list[int]) -> None:
        """Add groups of `samples` sequences; all sequences of a group have the same length."""
        case = self._case
        for start in range(0, len(lengths), case.samples):
            some = lengths[start : start + case.samples]
            prompt = [self._chance.randrange(self._shape.vocab_size) for _ in range(case.prompt)]
            sampling = Sampling(samples=len(some), max_new_tokens=some[0], temperature=1.0)
            self.decoder.add(PromptGroup(self._ordinal, Problem("", ""), tokens_to_bytes(prompt), sampling))
            self._ordinal += 1

    def run(self, lengths: list[int], *, change_weights: bool = False) -> tuple[float, float]:
        """Run to the end; returns the total seconds, and the seconds from the end of the first burst."""
        self._add(lengths)
        new_weights = _clone(self.decoder.model) if change_weights else []
        synchronize(self._device)
        start_s = self._clock()
        steps, first_s = 0, start_s
        while not self.decoder.idle:
            self.decoder.step()
            steps += 1
            if steps == 1 + self.decoder.lookahead:
                first_s = self._clock()
            if change_weights and steps == 10:
                self._change(new_weights)
        end_s = self._clock()
        self.peak_bytes = peak_memory_bytes(self._device)
        return end_s - start_s, end_s - first_s

    def rate(self, busy_s: float) -> float:
        """Tokens per second with all slots busy; `busy_s` is the second result of `run`."""
        return self._case.batch * (self._case.new - self.decoder.burst_steps) / busy_s

    def steady(self, runs: int = 1) -> float:
        """Median rate of several runs."""
        lengths = [self._case.new] * self._case.batch
        self.run(lengths)  # a first run, to capture the graphs
        return self.rate(statistics.median(self.run(lengths)[1] for _ in range(runs)))

    @torch.no_grad()
    def _change(self, weights: list[torch.Tensor]) -> None:
        torch._foreach_copy_(_changing(self.decoder.model), weights)
        self.decoder.version += 1

    def heavy_tailed(self) -> float:
        """Tokens per second with heavy-tailed lengths and continuous refill."""
        lengths = self.heavy_tailed_lengths()
        self.refilled(lengths)  # a first run, to capture a graph for each number of prompts that arrive together
        self.drain()
        rate = self.refilled(lengths)
        self.drain()
        return rate

    def heavy_tailed_lengths(self) -> list[int]:
        case, lengths = self._case, list[int]()
        while len(lengths) < _ROUNDS * case.batch:
            drawn = round(case.median * math.exp(self._chance.gauss(0, _SPREAD)))
            lengths += [min(max(1, drawn), _LONGEST * case.median)] * case.samples
        return lengths

    def refilled(self, lengths: list[int]) -> float:
        """Tokens per second until no sequence waits any more: as in training, there is always a next prompt."""
        self._add(lengths)
        before, start_s = self.decoder.tokens_sampled, self._clock()
        while self.decoder.num_waiting:
            self.decoder.step()
        synchronize(self._device)
        return (self.decoder.tokens_sampled - before) / (self._clock() - start_s)

    def drain(self) -> None:
        while not self.decoder.idle:
            self.decoder.step()


def _changing(model: Transformer) -> list[torch.Tensor]:
    """What arrives with a new version: all parameters, or the adapters."""
    if model.adapters is not None:
        return [tensor for one in model.adapters.applied() for tensor in (one.a, one.b)]
    return list(model.parameters())


def _clone(model: Transformer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in _changing(model)]


def floor_s(shape: ModelSpec, case: DecodeCase, ceilings: Ceilings) -> float:
    """Lower bound of a decode step's time: each product by its work or its bytes, then keys and values, then logits."""
    width, operand = PRECISIONS[case.precision].itemsize, _OPERANDS[case.precision].itemsize
    plain = case.dtype.itemsize

    def product_s(outputs: float, inputs: float) -> float:
        moved = outputs * inputs * width + case.batch * (inputs * operand + outputs * plain)
        return max(2 * case.batch * outputs * inputs / ceilings.flops, moved / ceilings.bytes)

    layer_s = sum(product_s(outputs, inputs) for outputs, inputs in layer_products(shape, tp=1))
    layer_s += num_adapter_parameters(shape, LoraConfig(rank=case.lora)) * plain / shape.num_layers / ceilings.bytes
    context, kv_width = case.prompt + case.new / 2, 1 if case.kv_cache == "fp8" else plain
    cache_bytes = case.batch * context * 2 * shape.num_layers * shape.kv_size * kv_width * shape.cached_share(context)
    return shape.num_layers * layer_s + _head_s(shape, case, ceilings) + cache_bytes / ceilings.bytes


def _head_s(shape: ModelSpec, case: DecodeCase, ceilings: Ceilings) -> float:
    """Lower bound of the head's time. It is never quantized; its fp32 logits are written once and read by the sampling."""
    weight_bytes = (shape.vocab_size + case.batch) * shape.hidden_size * case.dtype.itemsize
    scores_bytes = case.batch * shape.vocab_size * 4
    flops = ceilings.flops / (
        case.dtype.itemsize // _OPERANDS[case.precision].itemsize
    )  # fp8 is measured: twice as fast
    work_s = 2 * case.batch * shape.vocab_size * shape.hidden_size / flops
    return max(work_s, (weight_bytes + scores_bytes) / ceilings.bytes) + scores_bytes / ceilings.bytes


def describe_decode(result: DecodeResult) -> str:
    case = result.case
    rows = [
        ("decoding", f"{result.tokens_per_s:,.0f} tokens/s, {result.share_of_floor:.0%} of what the machine allows"),
        ("at most", f"{result.floor_tokens_per_s:,.0f} tokens/s"),
        ("with prefill", f"{result.tokens_per_s_with_prefill:,.0f} tokens/s"),
        ("heavy-tailed", f"{result.heavy_tailed_tokens_per_s:,.0f} tokens/s, {result.heavy_tailed_share:.0%}"),
        (
            "weights in flight",
            f"{result.weight_change_lost_s * 1e3:.1f} ms lost; a burst: {result.burst_s * 1e3:.1f} ms",
        ),
        ("first token", f"{result.first_token_s:.1f} s after the start of the process"),
        ("peak memory", f"{result.peak_memory_bytes / 2**30:.1f} GiB"),
    ]
    kv = f" ({case.kv_cache} KV)" if case.kv_cache != "auto" else ""
    title = f"{case.model}, {case.precision}{kv}, {case.batch} x ({case.prompt} + {case.new}) tokens on {case.device}"
    return "\n".join([title, *(f"  {name:<18} {text}" for name, text in rows)])
