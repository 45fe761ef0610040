"""Attention of prompt tokens that a decode step reads beside its answers, in several tilings.

    python benchmarks/prompt_attention.py [--tokens 128] [--json result.json]

Each tiling is timed as in attention_variants.py, and held against the first one, which tests hold against plain PyTorch. For
comparison, FlashAttention over copies of the pages, as chunks between bursts have it. TFLOP/s counts what causal attention
needs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from attention_variants import LAYERS, graph_s, random_qkv, shape_of  # beside this script
from torch import Tensor

from llamarl.generate.attention import ChunkAttention
from llamarl.generate.kv_cache import PagedCache
from llamarl.model.ops import rotate
from llamarl.model.rope import rope_up_to

PAGE = 16
TOLERANCE = 2e-2


class Case(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    size: int
    before: int  # tokens that come first


CASES = (
    Case("8B after 2k", 32, 8, 128, 2048),
    Case("8B after 6k", 32, 8, 128, 6144),
    Case("1B after 2k", 32, 8, 64, 2048),
    Case("Qwen 1.5B after 2k", 12, 2, 128, 2048),
)
TILINGS = (
    (128, 64, 8, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 2),
    (128, 128, 8, 2),
    (128, 32, 8, 4),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
)
PARTS = (0, 2, 4, 8)


class Scene:
    """Prompts of which `before` tokens are in their pages, one for each layer."""

    def __init__(self, case: Case, tokens: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        width = -(-(case.before + tokens) // PAGE)
        shape = shape_of(case.heads, case.kv_heads, case.size, LAYERS, width * PAGE)
        self.cache = PagedCache(shape, width, PAGE, dtype=torch.bfloat16, device=device)
        for tensor in self.cache.tensors:
            tensor.normal_(generator=generator)
        table_P, rows_M = (
            torch.randperm(width, device=device, generator=generator) + 1,
            torch.arange(tokens, device=device),
        )
        self.positions_M = case.before + rows_M
        self.rope = rope_up_to(shape, width * PAGE, device)
        self.where = table_P.to(torch.int32).expand(tokens, -1), rows_M, self.positions_M, self.rope
        pages_M = table_P[self.positions_M // PAGE]
        self.copies = ChunkAttention(self.cache, table_P, self.positions_M, pages_M, case.before + tokens)
        self.q, self.k, self.v = random_qkv(shape, tokens, torch.bfloat16, generator)

    def attend(self, layer: int, tiling: tuple[int, ...]) -> Tensor:
        from llamarl.generate.prompt_kernels import PromptTiling, attend_prompt

        keys, values = self.cache.keys(layer), self.cache.values(layer)
        return attend_prompt((self.q, self.k, self.v), keys, values, *self.where, how=PromptTiling(*tiling))

    def flash(self, layer: int) -> Tensor:
        at = tuple(part[self.positions_M][None] for part in self.rope)
        q, k, v = (part.transpose(0, 1) for part in (self.q, self.k, self.v))
        return self.copies(layer, rotate(q, at), rotate(k, at), v).transpose(0, 1)


def timed_us(attend: Callable[[int], Tensor]) -> float:
    def step() -> None:
        for layer in range(LAYERS):
            attend(layer)

    return graph_s(step) / LAYERS * 1e6


@torch.inference_mode()
def measure(case: Case, tokens: int, device: torch.device) -> list[dict[str, object]]:
    scene = Scene(case, tokens, device)
    operations = 4.0 * case.heads * case.size * sum(case.before + row + 1 for row in range(tokens))
    expected, found = scene.attend(0, TILINGS[0]).float(), list[dict[str, object]]()
    variants = [(*tiling, parts) for tiling, parts in product(TILINGS, PARTS)]
    for tiling in [None, *variants]:
        name = "/".join(map(str, tiling)) if tiling else "FlashAttention over copies"
        try:
            attend = (lambda layer, one=tiling: scene.attend(layer, one)) if tiling else scene.flash
            gap = float((attend(0).float() - expected).abs().max())
            us = timed_us(attend)
        except Exception as error:  # whatever a compiler may say
            print(f"| {case.name} | {name} | {type(error).__name__} | |", flush=True)
            continue
        tflops = operations / us / 1e6
        note = "" if gap < TOLERANCE else f", off by {gap:.3g}"
        print(f"| {case.name} | {name} | {us:.1f}{note} | {tflops:.0f} |", flush=True)
        found.append({"case": case.name, "tiling": name, "us": us, "tflops": tflops, "gap": gap})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="that a step reads")
    parser.add_argument("--case", action="append", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here; `make test-kernels` checks the kernel on a CPU")
    print("| case | rows/block/warps/stages/parts | us a layer | TFLOP/s |\n|---|---|---:|---:|")
    results = [
        one
        for case in CASES
        if not arguments.case or case.name in arguments.case
        for one in measure(case, arguments.tokens, torch.device("cuda"))
    ]
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
