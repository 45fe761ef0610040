"""The least time that a decode step can take on a machine with these limits."""

from __future__ import annotations

from msgspec.structs import replace

from llamarl.bench.decode_case import OPERANDS, PRECISIONS, DecodeCase
from llamarl.bench.machine import Ceilings
from llamarl.config import LoraConfig
from llamarl.families.adapters import num_adapter_parameters
from llamarl.model_spec import ModelSpec
from llamarl.plan.terms import expert_products, layer_products


def floor_s(shape: ModelSpec, case: DecodeCase, ceilings: Ceilings, used_experts: float = 0.0) -> float:
    """Lower bound of a decode step's time, with half-grown answers: each product by its work or its bytes, then keys and
    values, then logits. Of experts, the bytes of those that are used: `used_experts` in a layer, on average."""
    width, operand = PRECISIONS[case.precision].itemsize, OPERANDS[case.precision].itemsize
    plain = case.dtype.itemsize

    def product_s(outputs: float, inputs: float) -> float:
        moved = outputs * inputs * width + case.batch * (inputs * operand + outputs * plain)
        return max(2 * case.batch * outputs * inputs / ceilings.flops, moved / ceilings.bytes)

    def experts_s() -> float:
        copies, found = case.batch * shape.experts_per_token, 0.0
        for outputs, inputs in expert_products(shape, tp=1):
            work_s = 2 * copies * outputs * inputs / ceilings.flops
            found += max(work_s, used_experts * outputs * inputs * width / ceilings.bytes)
        return found

    mixed = len(shape.expert_layers)
    plain_s = sum(product_s(*sizes) for sizes in layer_products(replace(shape, experts=0) if mixed else shape, tp=1))
    mixed_s = sum(product_s(*sizes) for sizes in layer_products(shape, tp=1)) + experts_s() if mixed else 0.0
    layers_s = (shape.num_layers - mixed) * plain_s + mixed * mixed_s
    layers_s += num_adapter_parameters(shape, bench_lora(shape, case.lora)) * plain / ceilings.bytes
    kv_width = 1 if case.kv_cache == "fp8" else plain
    read = cached_tokens(case) * shape.cached_share(case.prompt + case.new / 2)
    cache_bytes = read * 2 * shape.num_layers * shape.kv_size * kv_width
    return layers_s + _head_s(shape, case, ceilings) + cache_bytes / ceilings.bytes


def bench_lora(shape: ModelSpec, rank: int) -> LoraConfig:
    """Adapters beside all layers, or beside attention alone in models with experts."""
    return LoraConfig(rank=rank, targets="attention") if shape.experts else LoraConfig(rank=rank)


def cached_tokens(case: DecodeCase) -> float:
    """Different tokens in the cache with half-grown answers. A group shares the full pages of its prompt, so a machine need
    read them once for all its answers."""
    shared = (case.prompt - 1) // case.page_tokens * case.page_tokens
    return case.num_prompts * shared + case.batch * (case.prompt - shared + case.new / 2)


def _head_s(shape: ModelSpec, case: DecodeCase, ceilings: Ceilings) -> float:
    """Lower bound of the head's time. It is never quantized; its fp32 logits are written once and read by the sampling."""
    weight_bytes = (shape.vocab_size + case.batch) * shape.hidden_size * case.dtype.itemsize
    scores_bytes = case.batch * shape.vocab_size * 4
    narrower = case.dtype.itemsize // OPERANDS[case.precision].itemsize  # fp8 is measured: twice as fast
    work_s = 2 * case.batch * shape.vocab_size * shape.hidden_size / (ceilings.flops / narrower)
    return max(work_s, (weight_bytes + scores_bytes) / ceilings.bytes) + scores_bytes / ceilings.bytes
