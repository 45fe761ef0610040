"""One rank of a planned generator: built, filled with prompts, and taken through a prefill and a decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from llamarl.generate.attention import DecodeAttention, PrefillAttention
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.device_runner import PREFILL_ROWS
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.limits import Limits, Precision
from llamarl.generate.loading import load_rank
from llamarl.generate.pages import pages_for
from llamarl.generate.parallel import TensorRank
from llamarl.generate.sampling import sample_tokens
from llamarl.generate.slots import SlotState
from llamarl.layout.boxes import shape_of
from llamarl.model import ops, quantize
from llamarl.model.lora import Adapters
from llamarl.model.lora_serving import AdaptedProduct, merge_adapters, serve_adapters
from llamarl.model.quantize import Quantization
from llamarl.model.transformer import Transformer
from llamarl.plan.generator import Replica
from llamarl.plan.terms import wire
from llamarl.rehearse.experts import EXPERT_OPERATIONS, EXPERT_TWINS
from llamarl.rehearse.memory import RankMemory
from llamarl.rehearse.tracking import MemoryTracker
from llamarl.rehearse.world import DEVICE, fake_memory, fake_ranks
from llamarl.types import Problem, PromptGroup, Sampling, tokens_to_bytes

# Plain code that one kernel replaces on a GPU: its results take memory there, its other tensors do not.
TWINS = (
    ops.rms_norm,
    ops.rotate,
    ops.silu_times,
    ops.gelu_times,
    ops.scores,
    quantize.quantize_rows,
    quantize.fp8_product,
    quantize.int8_product,
    quantize.narrow_silu_times,
    quantize.NarrowNorm.forward,
    quantize.NarrowActivation.__call__,
    quantize.NarrowStreamInput.forward,
    AdaptedProduct._inner,
    AdaptedProduct.beside,
    PrefillAttention.__call__,
    DecodeAttention.__call__,
    sample_tokens,
    SlotState.advance,
    *EXPERT_TWINS,
)


def rehearse_generator(replica: Replica, rank: int, *, cached_tokens: float, samples: int) -> RankMemory:
    """Memory of one rank with all slots busy, and with pages for as many tokens as the plan reckons with."""
    part = TensorRank(rank, replica.tp, replica.expert)
    part.check(replica.shape)
    owners: dict[Callable[..., Any], str] = {PagedCache.__init__: "KV cache", SlotState.__init__: "activations"}
    tracker = MemoryTracker("activations", twins=TWINS, owners=owners, opened=EXPERT_OPERATIONS)
    with fake_ranks(rank, replica.tp), fake_memory(tracker):
        with tracker.kind("weights"):
            decoder = _build(replica, part, cached_tokens)
        building_bytes = float(tracker.peak)
        tracker.forget_peak()
        decoder.version = 0
        for ordinal in range(min(PREFILL_ROWS, -(-replica.slots // samples))):
            decoder.add(_group(ordinal, replica, samples))
        decoder.launch()
    return RankMemory(rank, dict(tracker.at_peak), building_bytes)


def _build(replica: Replica, part: TensorRank, cached_tokens: float) -> ContinuousDecoder:
    """As `builders/generator.py` builds it, without a checkpoint."""
    precision = precision_of(replica)
    model = load_rank(replica.shape, part, precision, dtype=torch.bfloat16, device=DEVICE, fill=lambda memory: None)
    limits = Limits(
        slots=replica.slots, max_prompt_tokens=replica.prompt, max_new_tokens=replica.length - replica.prompt
    )
    return ContinuousDecoder(
        model,
        replace(limits, num_pages=max(limits.least_pages, pages_for(round(cached_tokens), limits.page_tokens))),
        eos_ids=(),
        seed=0,
        tensor_ranks=part.count,
        precision=precision,
        add_adapters=partial(_add_adapters, replica, part) if replica.lora else None,
    )


def _add_adapters(replica: Replica, part: TensorRank, model: Transformer) -> Adapters:
    add = merge_adapters if replica.merged else serve_adapters
    return add(model, replica.lora, lambda parameter: shape_of(part.box(parameter)))


def precision_of(replica: Replica) -> Precision:
    """Formats of the weights; wide ones are kept only where new versions arrive wide, and a frozen base never does."""
    narrow: dict[str, Quantization] = {"fp8": "fp8", "int8": "int8"}
    wide = wire(replica.precision, replica.shape) != replica.precision and not replica.lora
    return Precision(weights=narrow.get(replica.precision, "none"), keep_wide=wide)


def _group(ordinal: int, replica: Replica, samples: int) -> PromptGroup:
    sampling = Sampling(samples=samples, max_new_tokens=replica.length - replica.prompt)
    return PromptGroup(ordinal, Problem("", ""), tokens_to_bytes([0] * replica.prompt), sampling)
