"""On which shares of a GPU's multiprocessors are products right, and how fast? (`engine.mps_trainer_share`)

    python benchmarks/mps_products.py [--shares 0.25,0.4,0.5,0.62,0.75] [--model qwen2.5-1.5b]

NVIDIA's MPS keeps a process to each share; there the products of the model are compared with those of the host, as a trainer
does that computes on a share, and a product of 8192 cubed is timed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from llamarl.engine.local.mps import MpsDaemon
from llamarl.engine.local.mps_products import SHARE, first_wrong
from llamarl.model.hf_config import find_shape
from llamarl.train.speed import synchronize

SHARES, SIZE, TIMES = "0.25,0.3,0.35,0.4,0.45,0.5,0.55,0.62,0.7,0.75,0.8,0.9,1", 8192, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", default=SHARES)
    parser.add_argument("--model", default="qwen2.5-1.5b", help="a shape by name")
    parser.add_argument("--here", action="store_true", help="measure this process, on whatever share it is")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    if args.here:
        print(measured(args.model), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        daemon = MpsDaemon(Path(folder) / "mps.log")
        print("| share | multiprocessors | TFLOP/s | products |\n|---:|---:|---:|---|", flush=True)
        try:
            for share in map(float, args.shares.split(",")):
                environment = {**os.environ, **daemon.environment, SHARE: f"{100 * share:g}"}
                command = [sys.executable, __file__, "--here", "--model", args.model]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                print(f"| {share:g} | {done.stdout.strip()} |", flush=True)
        finally:
            daemon.stop()


def measured(model: str) -> str:
    device = torch.device("cuda", 0)
    number = torch.cuda.get_device_properties(device).multi_processor_count
    wrong = first_wrong(find_shape(model), device)
    operands = torch.randn(2, SIZE, SIZE, device=device, dtype=torch.bfloat16)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    _ = operands[0] @ operands[1]
    synchronize(device)
    first.record()
    for _ in range(TIMES):
        _ = operands[0] @ operands[1]
    last.record()
    synchronize(device)
    tflops = TIMES * 2 * SIZE**3 / (first.elapsed_time(last) / 1e3) / 1e12
    return f"{number} | {tflops:.0f} | {'**wrong**: ' + wrong if wrong else 'right'}"


if __name__ == "__main__":
    main()
