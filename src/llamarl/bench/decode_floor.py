"""The least time that a decode step can take on a machine with these limits."""

from __future__ import annotations

from llamarl.bench.decode_case import OPERANDS, PRECISIONS, DecodeCase
from llamarl.bench.machine import Ceilings
from llamarl.config import LoraConfig
from llamarl.families.adapters import num_adapter_parameters
from llamarl.model_spec import ModelSpec
from llamarl.plan.terms import layer_products


def floor_s(shape: ModelSpec, case: DecodeCase, ceilings: Ceilings) -> float:
    """Lower bound of a decode step's time, with half-grown answers: each product by its work or its bytes, then keys and
    values, then logits."""
    width, operand = PRECISIONS[case.precision].itemsize, OPERANDS[case.precision].itemsize
    plain = case.dtype.itemsize

    def product_s(outputs: float, inputs: float) -> float:
        moved = outputs * inputs * width + case.batch * (inputs * operand + outputs * plain)
        return max(2 * case.batch * outputs * inputs / ceilings.flops, moved / ceilings.bytes)

    layer_s = sum(product_s(outputs, inputs) for outputs, inputs in layer_products(shape, tp=1))
    layer_s += num_adapter_parameters(shape, LoraConfig(rank=case.lora)) * plain / shape.num_layers / ceilings.bytes
    kv_width = 1 if case.kv_cache == "fp8" else plain
    read = cached_tokens(case) * shape.cached_share(case.prompt + case.new / 2)
    cache_bytes = read * 2 * shape.num_layers * shape.kv_size * kv_width
    return shape.num_layers * layer_s + _head_s(shape, case, ceilings) + cache_bytes / ceilings.bytes


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
