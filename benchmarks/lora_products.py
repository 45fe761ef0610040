"""What adapters cost beside each product of a decode step, and which sizes of tiles are fastest.

    python benchmarks/lora_products.py [--models llama-3.2-1b llama-3.1-8b] [--rows 256] [--rank 32] [--sweep]

Times are of one layer, in graphs over several layers, so that weights come from memory as in a decoder. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llamarl.config import LoraConfig
from llamarl.model import lora_kernels
from llamarl.model.linear import JoinedLinear
from llamarl.model.lora import Adapters
from llamarl.model.lora_serving import AdaptedGate, AdaptedProduct, Part
from llamarl.model.ops import silu_times
from llamarl.model_spec import ModelSpec, shape_named

CUDA = torch.device("cuda", 0)
COLD_BYTES = 400 << 20  # of weights in a graph: several times a GPU's cache
CHOICES: dict[str, tuple[Any, ...]] = {
    "shrink_rows": (16, 32, 64),
    "sum_length": (256, 512, 1024),
    "depth": (64, 128),
    "rows": (32, 64, 128),
    "columns": (64, 128, 256),
    "warps": (4, 8),
    "gated_columns": (64, 128),
    "gated_warps": (4, 8),
    "early": (False,),
}

Step = Callable[[Tensor], Tensor]


def graph_us(steps: list[Step], x: Tensor) -> float:
    """Microseconds of one step, in a graph of all of them."""
    with torch.inference_mode():
        for step in steps[:2]:
            step(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step(x)
        times = list[float]()
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3 / len(steps)


def products_of(shape: ModelSpec) -> Iterator[tuple[str, int, list[int]]]:
    """Name, inputs, and outputs of each layer in it."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "q, k, v", shape.hidden_size, [q, kv, kv]
    yield "attention's output", q, [shape.hidden_size]
    yield "gate, up", shape.hidden_size, [shape.intermediate_size, shape.intermediate_size]
    yield "down", shape.intermediate_size, [shape.hidden_size]


def steps_of(inputs: int, outputs: list[int], rank: int, *, adapted: bool) -> list[Step]:
    adapters, found = Adapters(LoraConfig(rank=rank), torch.bfloat16), list[Step]()
    for _ in range(max(4, COLD_BYTES // (2 * inputs * sum(outputs)))):
        base = JoinedLinear(_random(sum(outputs), inputs), None)
        starts = [sum(outputs[:index]) for index in range(len(outputs))]
        parts = [Part("", slice(start, start + size)) for start, size in zip(starts, outputs, strict=True)]
        kind = AdaptedGate if len(outputs) == 2 else AdaptedProduct
        made = kind(base, _random(rank * len(parts), inputs), _random(sum(outputs), rank), parts, adapters)
        step: Step = made if adapted else base
        if len(outputs) == 2:
            activate = made.activate if adapted and isinstance(made, AdaptedGate) else silu_times
            step = _both(step, activate)
        found.append(step)
    return found


def _both(first: Step, second: Callable[..., Tensor]) -> Step:
    return lambda x: second(first(x))


def _random(*size: int) -> Tensor:
    return (torch.randn(size, device=CUDA) * 0.02).bfloat16()


def measure(model: str, rows: int, rank: int, plain: dict[str, float]) -> dict[str, float]:
    """Microseconds that the adapters add to each product; the plain ones are measured once."""
    found = {}
    for name, inputs, outputs in products_of(shape_named(model)):
        x = torch.randn(rows, inputs, device=CUDA).bfloat16()
        if name not in plain:
            plain[name] = graph_us(steps_of(inputs, outputs, rank, adapted=False), x)
        found[name] = graph_us(steps_of(inputs, outputs, rank, adapted=True), x) - plain[name]
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "llama-3.1-8b"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sweep", action="store_true", help="try other sizes of tiles too, one at a time")
    args = parser.parse_args()
    for model in args.models:
        plain: dict[str, float] = {}
        now = measure(model, args.rows, args.rank, plain)
        print(f"{model}, {args.rows} rows, rank {args.rank}; plain and added us: ", end="")
        print("; ".join(f"{name} {plain[name]:.1f} + {now[name]:.1f}" for name in now), flush=True)
        tuning = lora_kernels.TUNING
        for key, value in product(CHOICES, range(3)) if args.sweep else ():
            if value < len(CHOICES[key]) and CHOICES[key][value] != getattr(tuning, key):
                vars(lora_kernels)["TUNING"] = tuning._replace(**{key: CHOICES[key][value]})
                try:
                    found = measure(model, args.rows, args.rank, plain)
                except Exception as error:  # a tile that does not fit
                    print(f"  {key}={CHOICES[key][value]}: {str(error).splitlines()[0][:80]}")
                    continue
                print(
                    f"  {key}={CHOICES[key][value]}: " + "; ".join(f"+ {one:.1f}" for one in found.values()), flush=True
                )
        vars(lora_kernels)["TUNING"] = tuning


if __name__ == "__main__":
    main()
