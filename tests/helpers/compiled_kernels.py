"""Every Triton kernel compiled for a Hopper GPU, on a machine without one: the compiler may refuse what the interpreter runs.

Kernels are launched by their own functions with tensors on a CPU; a launch ends when its kernel is compiled. As a program, it
prints a line for each kernel, with the most bytes of shared memory that it asks for, and fails if one was left out.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import llamarl
from helpers.paged_attention import shape_of
from llamarl.generate import attention_kernels, page_kernels, prompt_kernels, sampling_kernels
from llamarl.generate.attention import Readings
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.kv_splits import SharedCut
from llamarl.generate.slots import SlotState
from llamarl.model import expert_kernels, expert_train_kernels, kernels, lora_kernels, quantize_kernels
from llamarl.model.expert_products import AdapterPair, ExpertAdapters
from llamarl.model.quantize import FP8
from llamarl.model.rope import rope_up_to
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions
from llamarl.weights import kernels as weight_kernels

BF16 = torch.bfloat16
HOPPER = GPUTarget("cuda", 90, 32)
_LAUNCH = re.compile(r"^\s*(_\w+)\[\(", re.MULTILINE)


class AbsentGpu:
    """As much of Triton's driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_all() -> dict[str, list[Any]]:
    """Compiled variants of each kernel, by its name."""
    found, run = defaultdict[str, list[Any]](list), JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, **how: Any) -> Any:
        compiled = run(kernel, *args, **{**how, "warmup": True})
        found[kernel.fn.__name__].append(compiled)
        return compiled

    driver.set_active(AbsentGpu())
    JITFunction.run = compile_only
    try:
        for narrow in (False, True):
            _attention(128, narrow)
        _attention(256, False, AttentionOptions(window=64))
        _sampling()
        _small_operations()
        _quantized()
        _adapters()
        _experts()
        _weights()
    finally:
        JITFunction.run = run
    return found


def _random(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(size).to(dtype)


def _attention(size: int, narrow: bool, options: AttentionOptions = PLAIN_ATTENTION) -> None:
    rows, heads, kv_heads, page, pages = 16, 8, 2, 16, 40
    shape = shape_of(heads, kv_heads, size)
    cache = PagedCache(shape, pages, page, dtype=FP8 if narrow else BF16, device="cpu")
    keys, values, rope = cache.keys(0), cache.values(0), rope_up_to(shape, 1024, torch.device("cpu"))
    q, k, v = (_random(rows, 1, count, size) for count in (heads, kv_heads, kv_heads))
    table, slots, positions = torch.ones(rows, 9, dtype=torch.int32), torch.arange(rows), torch.arange(rows)
    where = table, slots, positions, rope
    cuts = () if options.window else (SharedCut(), SharedCut(8, block=64))
    for readings in (None, *(Readings(positions, positions, positions, cut) for cut in cuts)):
        attention_kernels.attend_pages((q, k, v), keys, values, *where, readings, options=options)
    attention_kernels.attend_pages((q, k, v), keys, values, *where, parts=4, drafted=True, options=options)
    tokens = 128
    q, k, v = (_random(tokens, 1, count, size) for count in (heads, kv_heads, kv_heads))
    table, slots, positions = table[:1].expand(tokens, -1), torch.arange(tokens), torch.arange(tokens)
    prompt_kernels.attend_prompt((q, k, v), keys, values, table, slots, positions, rope, options=options)
    if not narrow:
        page_kernels.write_pages(_random(2, 8, kv_heads, size), _random(2, 8, kv_heads, size), keys, values, slots[:16])


def _sampling() -> None:
    state, logits = SlotState(8, 16, (1, 2), torch.device("cpu")), _random(8, 32_000, dtype=torch.float32)
    for filtered in (False, True):
        sampling_kernels.sample_and_advance(logits, torch.arange(8), state, 7, filtered=filtered)


def _small_operations() -> None:
    x, weight = _random(4, 3, 512, dtype=torch.float32), _random(512)
    heads, rope = _random(2, 5, 3, 64), tuple(_random(2, 5, 1, 64, dtype=torch.float32) for _ in range(2))
    kernels.rotate(heads, rope)
    for plus_one in (False, True):
        kernels.rms_norm(x, weight, 1e-6, plus_one=plus_one)
        kernels.silu_times(_random(12, 1024), gelu=plus_one)
        scales = (_random(12, dtype=torch.float32), _random(512, dtype=torch.float32)) if plus_one else None
        terms = kernels.Terms(_random(1 if scales else 2, 12, 512, dtype=BF16 if scales else torch.float32), scales)
        kernels.add_terms(x.view(12, 512), terms)
        kernels.add_and_norm(x.view(12, 512), terms, weight, 1e-6, plus_one=plus_one)
        quantize_kernels.norm_rows(x.view(12, 512), weight, 1e-6, terms, plus_one=plus_one)


def _quantized() -> None:
    for dtype in (FP8, torch.int8):
        quantize_kernels.quantize_rows(_random(12, 512), dtype)
    scales = _random(12, dtype=torch.float32), _random(1024, dtype=torch.float32)
    quantize_kernels.silu_rows(kernels.Terms(_random(1, 12, 1024), scales))
    quantize_kernels.norm_rows(_random(12, 512, dtype=torch.float32), _random(512), 1e-6)
    weight, columns = torch.ones(256, 512, dtype=torch.int8), torch.ones(256)
    for rows, bias in ((3, None), (200, _random(256))):
        quantize_kernels.int8_product(_random(rows, 512), weight, columns, bias)


def _adapters() -> None:
    tiles = lora_kernels.tiles_of([slice(0, 256), slice(256, 384)])
    for rows in (5, 300):
        h = lora_kernels.shrink(_random(rows, 1024), _random(16, 1024), early=False)
        lora_kernels.expand_add(_random(rows, 384), h, _random(384, 8), tiles, 0.5, early=False)
        lora_kernels.expand_gated(_random(rows, 512), h, _random(512, 8), True, 0.5, early=False)
    scaled = _random(5, 1024).to(FP8), torch.ones(5)
    lora_kernels.shrink(scaled, _random(16, 1024), early=False)
    for held, applied in ((torch.float32, BF16), (BF16, BF16), (torch.float32, torch.float32)):
        table = lora_kernels.hash_table([(_random(8, 16, dtype=held), 0, 16, 1)], torch.device("cpu"))
        lora_kernels.hash_tiles(torch.zeros(1, dtype=torch.int64), table, 3, held, BF16, applied)


def _experts() -> None:
    tokens, experts, k, inner, hidden, rank = 64, 8, 2, 128, 256, 16
    x, total = _random(tokens, hidden), _random(tokens, hidden, dtype=torch.float32)
    gate_up, down = _random(experts, 2, inner, hidden), _random(experts, hidden, inner)
    ids, weights = expert_kernels.route(_random(tokens, experts, dtype=torch.float32), k, True)
    expert_kernels.add_experts(total, x, gate_up, down, ids, weights)
    scales = torch.ones(experts, 2, inner), torch.ones(experts, hidden)
    for dtype in (torch.int8, FP8):
        expert_kernels.add_experts(total, x, gate_up.to(dtype), down.to(dtype), ids, weights, scales)
    pairs = (
        AdapterPair(_random(experts, rank, hidden), _random(experts, 2, inner, rank)),
        AdapterPair(_random(experts, rank, inner), _random(experts, hidden, rank)),
    )
    expert_kernels.add_experts(total, x, gate_up, down, ids, weights, None, ExpertAdapters(*pairs, 0.5))
    order, ends = torch.arange(tokens * k), torch.full((experts,), tokens * k, dtype=torch.int32)
    expert_train_kernels.gated_backward(
        _random(tokens * k, 2 * inner), _random(tokens * k, inner), torch.rand(tokens, k), order, ends
    )
    expert_train_kernels.sum_rows(_random(tokens * k, hidden), order, torch.rand(tokens, k), k, ends, torch.float32)
    expert_train_kernels.zero_unused(_random(experts, inner, hidden), ends)


def _weights() -> None:
    for wide in (False, True):
        table = weight_kernels.RowTable(torch.zeros(2, 3, dtype=torch.int64), 512, wide)
        weight_kernels.quantize_rows(table, 448.0, 1e-12)
        tiles, sums = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        weight_kernels.launch(tiles, sums, copy=True, add=True, narrow=wide)


def launched_kernels() -> set[str]:
    """Names of the kernels that the package launches."""
    files = Path(llamarl.__file__).parent.rglob("*kernels.py")
    return {name for file in files for name in _LAUNCH.findall(file.read_text())}


if __name__ == "__main__":
    compiled = compile_all()
    for name, variants in sorted(compiled.items()):
        print(json.dumps([name, max(one.metadata.shared for one in variants)]))
    missing = launched_kernels() - compiled.keys()
    assert not missing, f"no function here launches {', '.join(sorted(missing))}"
