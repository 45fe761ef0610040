"""The kernel between the two products of an MLP in fp8: gates a row and quantizes it. Whole rows, as it is, or in parts.

    python benchmarks/gated_rows.py [--rows 512] [--json result.json]

Needs a GPU. As a whole, a row is one block of the next power of two: 8,960 numbers leave nearly half of its lanes idle, and
a program has a multiprocessor to itself. In parts, numbers are written as they are gated, and read again when the largest of
the row is known; one division serves the row, and a correction rounds each number as a division would. Every variant must
give the same numbers (a zero may have another sign). Sixteen layers follow each other in a CUDA graph, so that none is found
in the GPU's own memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
from attention_variants import graph_s  # beside this script
from torch import Tensor

from llamarl.model.kernels import Terms
from llamarl.model.quantize_kernels import silu_rows

LAYERS, LARGEST = 16, 448.0
SIZES = {"1B": 8192, "Qwen 1.5B": 8960, "8B": 14336, "70B": 28672}
PARTS = (512, 1024, 2048, 4096)
WARPS = (2, 4, 8)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_in_parts(  # type: ignore[no-untyped-def]
    x_ptr,
    row_scales_ptr,
    column_scales_ptr,
    gated_ptr,
    values_ptr,
    scales_ptr,
    size,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row_scale, largest = tl.load(row_scales_ptr + row), tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK):
        columns = start + lanes
        inside = columns < size
        at = x_ptr + row * 2 * size + columns
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
        gate *= row_scale * tl.load(column_scales_ptr + columns, mask=inside, other=0.0)
        up *= row_scale * tl.load(column_scales_ptr + size + columns, mask=inside, other=0.0)
        gated = (gate * tl.sigmoid(gate) * up).to(gated_ptr.dtype.element_ty)
        tl.store(gated_ptr + row * size + columns, gated, mask=inside)
        largest = tl.maximum(largest, tl.abs(gated.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, axis=0) / LARGEST, 1e-12)
    tl.store(scales_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    tl.debug_barrier()  # what other threads of the program have written is read from here on
    for start in tl.range(0, size, BLOCK):
        columns = start + lanes
        gated = tl.load(gated_ptr + row * size + columns, mask=columns < size, other=0.0).to(tl.float32)
        found = gated * inverse
        found = tl.fma(tl.fma(-found, scale, gated), inverse, found)
        narrow = tl.minimum(tl.maximum(found, -LARGEST), LARGEST).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * size + columns, narrow, mask=columns < size)


def gate_in_parts(gate_up: Terms, block: int, warps: int) -> tuple[Tensor, Tensor]:
    _, rows, double = gate_up.parts_PMN.shape
    gated = torch.empty(rows, double // 2, dtype=gate_up.parts_PMN.dtype, device=gate_up.parts_PMN.device)
    values = torch.empty_like(gated, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, dtype=torch.float32, device=gated.device)
    _gate_in_parts[(rows,)](
        *gate_up.pointers, gated, values, scales, double // 2, LARGEST=LARGEST, BLOCK=block, num_warps=warps
    )
    return values, scales


Gate = Callable[[Terms], tuple[Tensor, Tensor]]


@torch.inference_mode()
def layer_us(gate: Gate, layers: list[Terms]) -> float:
    def step() -> None:
        for one in layers:
            gate(one)

    return 1e6 * graph_s(step) / len(layers)


def in_parts(block: int, warps: int) -> Gate:
    return lambda gate_up: gate_in_parts(gate_up, block, warps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    variants: dict[str, Gate] = {"whole": silu_rows}
    variants |= {f"{block}, {warps} warps": in_parts(block, warps) for block, warps in product(PARTS, WARPS)}
    results = []
    for name, size in SIZES.items():
        scales = 0.5 + torch.rand(arguments.rows, device="cuda"), 0.5 + torch.rand(2 * size, device="cuda")
        layers = [
            Terms(torch.randn(1, arguments.rows, 2 * size, device="cuda").bfloat16(), scales) for _ in range(LAYERS)
        ]
        expected, found = silu_rows(layers[0]), dict[str, float]()
        for variant, gate in variants.items():
            mine = gate(layers[0])
            for one, other in zip(mine, expected, strict=True):
                assert torch.equal(one.float(), other.float()), f"{name}: {variant} differs"
            found[variant] = layer_us(gate, layers)
        best = min(found, key=lambda variant: found[variant])
        print(f"{name:10} whole {found['whole']:6.1f} us, best {found[best]:6.1f} us: {best}", flush=True)
        results.append({"model": name, "size": size, "rows": arguments.rows, "us": found})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
