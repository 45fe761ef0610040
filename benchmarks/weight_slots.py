"""How fast weights move through the slots, held against a plain copy of the same bytes in memory.

    python benchmarks/weight_slots.py [--threads 1 2] [--rounds 15] [--json result.json]

About 100 million fp32 parameters in the shapes of a small Llama. `copy` is torch's `copy_` from one flat tensor to
another; `publish` copies into a slot in shared memory, sums every byte and makes the version visible; `load` verifies the
sums and copies out. Rounds alternate between the three, and each ratio is taken within its round. Exits with 1 when a
publication reaches less than 60% of the copy's rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter

PROMISED = 0.60
LAYERS, WIDTH, HIDDEN, VOCABULARY = 11, 768, 2048, 32_000
WARM_UP = 2


def parameters() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"{layer}.{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.{name}": (HIDDEN, WIDTH) for name in ("gate", "up", "down")}
        shapes |= {f"{layer}.{name}": (WIDTH,) for name in ("norm1", "norm2")}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def seconds(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def measure(threads: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    written = parameters()
    num = sum(parameter.numel() for parameter in written.values())
    source, target = torch.randn(num), torch.zeros(num)
    file = SlotFile()
    writer = SlotWriter(file, written, lease_s=30)
    reader = SlotReader(file, {name: torch.zeros_like(parameter) for name, parameter in written.items()})
    times: dict[str, list[float]] = {"copy": [], "publish": [], "load": []}
    for version in range(WARM_UP + rounds):
        times["copy"].append(seconds(lambda: target.copy_(source)))
        times["publish"].append(seconds(lambda version=version: writer.publish(version)))  # type: ignore[misc]
        times["load"].append(seconds(lambda version=version: reader.load(version)))  # type: ignore[misc]
    file.close()
    counted = {name: found[WARM_UP:] for name, found in times.items()}
    rates = {f"{name}_gb_s": num * 4 / 1e9 / statistics.median(found) for name, found in counted.items()}
    ratios = {
        f"{name}_ratio": statistics.median(
            copy_s / other_s for copy_s, other_s in zip(counted["copy"], counted[name], strict=True)
        )
        for name in ("publish", "load")
    }
    return {"threads": threads, "parameters": num, **rates, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    rows = [measure(threads, args.rounds) for threads in args.threads]
    print("| threads | parameters | copy, GB/s | publish, GB/s | load, GB/s | publish / copy | load / copy |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['threads']} | {row['parameters'] / 1e6:.1f} M | {row['copy_gb_s']:.1f} | {row['publish_gb_s']:.1f} "
            f"| {row['load_gb_s']:.1f} | {row['publish_ratio']:.2f} | {row['load_ratio']:.2f} |"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(min(row["publish_ratio"] for row in rows) < PROMISED)


if __name__ == "__main__":
    main()
