"""`llamarl bench decode`: how fast the generator samples, and how close that is to the machine's limit."""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import Literal

import numpy as np
import torch
from msgspec import Struct

from llamarl.bench.decode_case import LONGEST, OPERANDS, DecodeCase, DecodeFigures
from llamarl.bench.decode_floor import bench_lora, floor_s
from llamarl.bench.decode_windows import DecodeWindows
from llamarl.bench.jumping_decoder import JumpingDecoder
from llamarl.bench.machine import (
    Ceilings,
    Clock,
    kernel_times,
    measure_ceilings,
    peak_memory_bytes,
    process_age_s,
)
from llamarl.errors import InputError
from llamarl.generate.limits import Limits
from llamarl.model.checkpoint import random_model
from llamarl.model.lora import Adapters
from llamarl.model.lora_serving import serve_adapters
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import ModelSpec
from llamarl.train.speed import synchronize
from llamarl.types import Problem, PromptGroup, Sampling

_ROUNDS = 6  # heavy tail: sequences per slot
_PROFILED_STEPS = 24


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
    windows: int = 0  # lengths of answer at which a window was measured; 0: everything was run to its end


def profile_decode(shape: ModelSpec, case: DecodeCase) -> str:
    """Tables of the longest kernels in a few bursts and in a run with heavy-tailed lengths."""
    bench = DecodeBench(shape, case)
    windows = DecodeWindows(bench)
    if windows.fit:
        steady, heavy = windows.profiles(kernel_times)
    else:
        bench.run([case.new] * case.batch)
        steady = kernel_times(lambda: bench.run([_PROFILED_STEPS] * case.batch))
        lengths = bench.heavy_tailed_lengths()
        bench.refilled(lengths)
        bench.drain()
        heavy = kernel_times(lambda: bench.refilled(lengths))
    return f"{steady}\n\nheavy-tailed lengths:\n{heavy}"


def _decoder_of(shape: ModelSpec, case: DecodeCase, longest: int) -> JumpingDecoder:
    model = random_model(shape, dtype=case.dtype, device=torch.device(case.device))
    limits = Limits(
        slots=case.batch,
        max_prompt_tokens=case.prompt,
        max_new_tokens=longest,
        burst=case.burst,
        page_tokens=case.page_tokens,
        prefill_beside=case.beside,
    )
    decoder = JumpingDecoder(
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
    adapters = serve_adapters(model, bench_lora(model.shape, rank), lambda parameter: parameter.shape)
    with torch.no_grad():
        for one in adapters.applied():
            one.a.normal_(0.0, 0.02)
            one.b.normal_(0.0, 0.02)
    return adapters


def bench_decode(
    shape: ModelSpec, case: DecodeCase, *, by: Literal["auto", "windows", "whole"] = "auto"
) -> DecodeResult:
    """Measure how fast a model of this shape generates: with `auto`, by running everything to its end where that is quick,
    and otherwise by windows."""
    device, bench = torch.device(case.device), DecodeBench(shape, case)
    bench.run([1] * case.samples)
    first_token_s = process_age_s()
    windows = DecodeWindows(bench)
    if by == "windows" and not windows.fit:
        raise InputError(f"--by windows: answers of {case.new} tokens are too short for windows; measure whole runs")
    by_windows = by == "windows" or (by == "auto" and windows.needed)
    found = windows.measure() if by_windows else bench.whole()
    ceilings = measure_ceilings(device, OPERANDS[case.precision] if device.type == "cuda" else case.dtype)
    floor = case.batch / floor_s(shape, case, ceilings, used_experts(bench.decoder.model, case.batch))
    return DecodeResult(
        case=case,
        first_token_s=first_token_s,
        tokens_per_s=found.rate,
        tokens_per_s_with_prefill=found.rate_with_prefill,
        floor_tokens_per_s=floor,
        share_of_floor=found.rate / floor,
        heavy_tailed_tokens_per_s=found.heavy_tailed,
        heavy_tailed_share=found.heavy_tailed / found.rate,
        weight_change_lost_s=found.change_lost_s,
        burst_s=bench.decoder.burst_steps * case.batch / found.rate,
        peak_memory_bytes=peak_memory_bytes(device),
        ceilings=ceilings,
        windows=found.windows,
    )


@torch.inference_mode()
def used_experts(model: Transformer, tokens: int) -> float:
    """Number of experts of a layer that so many random tokens use in this model; mean over its layers with experts."""
    shape, device = model.shape, model.lm_head.weight.device
    if not shape.experts:
        return 0.0
    tokens_T1 = torch.randint(shape.vocab_size, (tokens, 1), generator=torch.Generator().manual_seed(0)).to(device)
    chosen = torch.empty(tokens, len(shape.expert_layers), shape.experts_per_token, dtype=torch.int64, device=device)
    model(tokens_T1, torch.zeros_like(tokens_T1), causal_attention, chosen=chosen)
    return statistics.fmean(len(set(of_layer.flatten().tolist())) for of_layer in chosen.unbind(1))


class DecodeBench:
    """A decoder with random weights and answers of known length. `longest` is the longest answer; 0: as in the heavy
    tail."""

    def __init__(self, shape: ModelSpec, case: DecodeCase, longest: int = 0, clock: Clock = time.perf_counter) -> None:
        self._shape, self.case, self.device, self.clock = shape, case, torch.device(case.device), clock
        self.longest = min(LONGEST * case.median, shape.max_positions - case.prompt)
        self.decoder = _decoder_of(shape, case, longest or max(case.new, self.longest))
        self._ordinal, self.chance = 0, random.Random(0)
        self._tokens = np.random.default_rng(0)

    def add(self, lengths: list[int]) -> None:
        """Add groups of `samples` sequences; all sequences of a group have the same length."""
        case = self.case
        for start in range(0, len(lengths), case.samples):
            some = lengths[start : start + case.samples]
            prompt = self._tokens.integers(self._shape.vocab_size, size=case.prompt, dtype=np.int32)
            sampling = Sampling(samples=len(some), max_new_tokens=some[0], temperature=1.0)
            self.decoder.add(PromptGroup(self._ordinal, Problem("", ""), prompt.tobytes(), sampling))
            self._ordinal += 1

    def whole(self) -> DecodeFigures:
        """Run everything to its end."""
        steady = [self.case.new] * self.case.batch
        self.run(steady)  # a first run, to capture the graphs
        whole_s, busy_s = self.run(steady)
        changed_s, _ = self.run(steady, change_weights=True)
        return DecodeFigures(
            rate=self.rate(busy_s),
            rate_with_prefill=self.case.batch * self.case.new / whole_s,
            change_lost_s=changed_s - whole_s,
            heavy_tailed=self.heavy_tailed(),
        )

    def run(self, lengths: list[int], *, change_weights: bool = False) -> tuple[float, float]:
        """Run to the end; returns the total seconds, and the seconds from the end of the first burst."""
        self.add(lengths)
        new_weights = self.clone_weights() if change_weights else []
        synchronize(self.device)
        start_s = self.clock()
        self.decoder.admit()  # all prompts before the first burst: long ones would be read between bursts, and counted there
        steps, first_s = 0, start_s
        while not self.decoder.idle:
            self.decoder.step()
            steps += 1
            if steps == 1 + self.decoder.lookahead:
                first_s = self.clock()
            if change_weights and steps == 10:
                self.change(new_weights)
        end_s = self.clock()
        return end_s - start_s, end_s - first_s

    def rate(self, busy_s: float) -> float:
        """Tokens per second with all slots busy; `busy_s` is the second result of `run`."""
        return self.case.batch * (self.case.new - self.decoder.burst_steps) / busy_s

    def steady(self, runs: int = 1) -> float:
        """Median rate of several runs."""
        lengths = [self.case.new] * self.case.batch
        self.run(lengths)  # a first run, to capture the graphs
        return self.rate(statistics.median(self.run(lengths)[1] for _ in range(runs)))

    def clone_weights(self) -> list[torch.Tensor]:
        """A copy of what arrives with a new version."""
        return [parameter.detach().clone() for parameter in _changing(self.decoder.model)]

    @torch.no_grad()
    def change(self, weights: list[torch.Tensor]) -> None:
        """Publish these weights as the next version."""
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
        case, lengths = self.case, list[int]()
        while len(lengths) < _ROUNDS * case.batch:
            lengths += [case.heavy_tailed(self.chance, self.longest)] * case.samples
        return lengths

    def refilled(self, lengths: list[int]) -> float:
        """Tokens per second until no sequence waits any more: as in training, there is always a next prompt."""
        self.add(lengths)
        before, start_s = self.decoder.tokens_sampled, self.clock()
        while self.decoder.num_waiting:
            self.decoder.step()
        synchronize(self.device)
        return (self.decoder.tokens_sampled - before) / (self.clock() - start_s)

    def drain(self) -> None:
        while not self.decoder.idle:
            self.decoder.step()


def _changing(model: Transformer) -> list[torch.Tensor]:
    """What arrives with a new version: all parameters, or the adapters."""
    if model.adapters is not None:
        return [tensor for one in model.adapters.applied() for tensor in (one.a, one.b)]
    return list(model.parameters())


def _how(windows: int) -> str:
    if not windows:
        return "whole runs"
    return f"windows at {windows} lengths of answer, from which the rest is computed; --by whole runs everything"


def describe_decode(result: DecodeResult) -> str:
    case = result.case
    rows = [
        ("measured", _how(result.windows)),
        ("decoding", f"{result.tokens_per_s:,.0f} tokens/s, {result.share_of_floor:.0%} of what the machine allows"),
        ("at most", f"{result.floor_tokens_per_s:,.0f} tokens/s; a prompt counts once for its {case.samples} answers"),
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
