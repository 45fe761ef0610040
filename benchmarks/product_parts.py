"""Into how many parts should a product be cut that is added to the residual stream? Product, sum and the norm behind it.

    python benchmarks/product_parts.py [--rows 256] [--json result.json]

Needs a GPU. One part: the sum is part of the product, and the norm a kernel of its own. Several: the parts are added by the
norm. Sixteen matrices follow each other in a CUDA graph, so that none is found in the GPU's own memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from attention_variants import graph_s  # beside this script
from torch import Tensor

MATRICES = 16
PRODUCTS = {  # outputs, inputs
    "1B: attention's result": (2048, 2048),
    "1B: MLP's result": (2048, 8192),
    "8B: attention's result": (4096, 4096),
    "8B: MLP's result": (4096, 14336),
    "SmolLM2: attention's result": (576, 576),
    "SmolLM2: MLP's result": (576, 1536),
}


@torch.inference_mode()
def product_us(rows: int, outputs: int, inputs: int, parts: int) -> float:
    from llamarl.model import kernels

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    weights, x_MK, norm_N = [normal(outputs, inputs) for _ in range(MATRICES)], normal(rows, inputs), normal(outputs)
    residual_MN = torch.randn(rows, outputs, device="cuda")
    x_PMk = x_MK.view(rows, parts, -1).transpose(0, 1)

    def step() -> None:
        for weight_NK in weights:
            if parts == 1:
                torch.addmm(residual_MN, x_MK, weight_NK.t(), out_dtype=torch.float32, out=residual_MN)
                kernels.rms_norm(residual_MN, norm_N, 1e-5)
                continue
            weight_PkN = weight_NK.view(outputs, parts, -1).permute(1, 2, 0)
            terms = kernels.Terms(torch.bmm(x_PMk, weight_PkN, out_dtype=torch.float32))
            kernels.add_and_norm(residual_MN, terms, norm_N, 1e-5)

    return 1e6 * graph_s(step) / MATRICES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    print("| product and norm, us | one part | 2 | 3 | 4 | 6 | 8 |\n|---|---:|---:|---:|---:|---:|---:|")
    results = []
    for name, (outputs, inputs) in PRODUCTS.items():
        possible = [parts for parts in (1, 2, 3, 4, 6, 8) if inputs % (parts * 64) == 0]
        found = {parts: product_us(arguments.rows, outputs, inputs, parts) for parts in possible}
        cells = (f"{found[parts]:.1f}" if parts in found else "-" for parts in (1, 2, 3, 4, 6, 8))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        results.append({"product": name, "us": found})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
