"""Claim 11: how large a model trains by RL on one GPU. Random weights of an 8B shape, made on the spot; the generator in fp8,
the optimizer's state in host memory, activations made again in the backward pass.

    python benchmarks/claims/one_gpu.py [--shape qwen3-8b] [--layers N] [--models FOLDER] [--tokenizer FOLDER] [KEY=VALUE ...]

Prints the time of an update and the most memory that GPU and host had in use. What is learned is nothing: the reward is the
length of an answer. Must: it runs 3 updates. With --layers the shape is made deeper, to find the largest that fits.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from arms import Arm, Figures, Options, Record, keep, made
from msgspec.structs import replace
from plot import bars
from watch import gpu_name, memory_used

from llamarl.families.parameters import num_parameters
from llamarl.model_spec import ModelSpec, shape_named

UPDATES, WARM_UP = 5, 2  # the first update compiles
GIB = 1 << 30
SETTINGS = (
    "task.kind=arithmetic",
    "reward.scorer=length",
    "reward.max_chars=2000",
    "algo.zero_variance=keep",  # whatever the rewards are, everything is computed
    "generator.quantize=fp8",
    "generator.slots=128",
    "generator.max_prompt_tokens=64",
    "generator.max_new_tokens=256",
    "generator.kv_pages=2700",
    "trainer.offload=true",
    "trainer.recompute=full",
    "trainer.tokens_per_pack=32768",  # all of an update in one pass: gradients of several are summed in fp32
    "trainer.lr=1e-6",
    "schedule.groups_per_update=16",
    "schedule.samples_per_group=4",
    "schedule.max_staleness=1",
    "schedule.probe_every=0",
    "evaluate.prompts=0",
    "evaluate.every=0",
    "snapshots.every=0",
    "snapshots.at_end=none",
    "engine.start_s=420",
    f"schedule.updates={UPDATES}",
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.yaml"


def make_folder(shape: ModelSpec, folder: Path, tokenizer: Path) -> None:
    """In a process of its own, so that no memory of it is left on the GPU."""
    if (folder / "config.json").exists():
        return
    import torch

    from llamarl.model.checkpoint import random_model, save_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    save_model(random_model(shape, dtype=torch.bfloat16, device=device), folder, carry_from=tokenizer)


class MemoryWatch:
    """The most that GPU and host had in use while something ran, in GiB."""

    def __init__(self) -> None:
        self.gpu_gib = self.host_gib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            self.gpu_gib = max(self.gpu_gib, memory_used() / GIB)
            self.host_gib = max(self.host_gib, host_memory_used() / GIB)


def host_memory_used() -> int:
    """What is not available to programs: files in the kernel's cache are."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(rows[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return (total - available) * 1024


def figures_of(shape: ModelSpec, record: Record, watch: MemoryWatch) -> dict[str, Any]:
    rows = [row for number, row in sorted(record.updates.items()) if number >= WARM_UP]
    return {
        "parameters": num_parameters(shape),
        "layers": shape.num_layers,
        "updates": len(record.updates),
        "update_s": fmean(row["update_s"] for row in rows),
        "compute_s": fmean(row.get("compute_s", 0.0) for row in rows),
        "answer_tokens": record.mean("answer_tokens"),
        "wall_s": record.summary["wall_s"],
        "gpu_gib": watch.gpu_gib,
        "host_gib": watch.host_gib,
        "met": len(record.updates) >= 3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", help="a model shape by name")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--models", type=Path, default=Path("models"), help="where the folder of weights is made")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/qwen2.5-coder-1.5b"), help="a folder with one")
    parser.add_argument("--keep", action="store_true", help="do not remove the folder of weights afterwards")
    parser.add_argument("--only-make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    shape = shape_named(args.shape)
    shape = replace(shape, num_layers=args.layers) if args.layers else shape
    name = f"one_gpu-{args.shape}-{shape.num_layers}"
    folder = args.models / name
    if args.only_make:
        make_folder(shape, folder, args.tokenizer)
        return
    started = time.monotonic()
    subprocess.run([sys.executable, *sys.argv, "--only-make"], check=True)
    print(f"{num_parameters(shape) / 1e9:.2f}B parameters made in {time.monotonic() - started:.0f} s", flush=True)
    args.results.mkdir(parents=True, exist_ok=True)
    settings = tuple(args.settings)
    options = Options(args.runs, args.results, settings, 1, Path(), command=settings)
    try:
        with MemoryWatch() as watch:
            record = made(Arm(name, (*SETTINGS, f"model.path={folder}"), EXAMPLE), options)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    found = figures_of(shape, record, watch)
    print(
        f"{found['parameters'] / 1e9:.2f}B on {gpu_name()}: {found['updates']} updates, {found['update_s']:.1f} s each "
        f"(passes and step {found['compute_s']:.1f} s); at most {found['gpu_gib']:.0f} GiB of GPU memory and "
        f"{found['host_gib']:.0f} GiB of host memory; {found['wall_s']:.0f} s in all"
    )
    keep(name, options, found, picture)


def picture(figures: Figures) -> str:
    values = {"GPU": figures["gpu_gib"], "host": figures["host_gib"]}
    return bars(f"Memory of an RL job with {figures['parameters'] / 1e9:.1f}B", "GiB", values, " GiB")


if __name__ == "__main__":
    main()
