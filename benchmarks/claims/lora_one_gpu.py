"""Claim 16: RL with LoRA of models that fit a GPU once, trainer and generator at the same time on one frozen base.

    python benchmarks/claims/lora_one_gpu.py qwen3-8b        # must: 45 GiB of GPU memory in all
    python benchmarks/claims/lora_one_gpu.py qwen3-32b       # must: 10 updates, prediction within 15%
    python benchmarks/claims/lora_one_gpu.py llama-3.1-70b   # must: 5 updates; a base in fp8
    python benchmarks/claims/lora_one_gpu.py qwen3-30b-a3b   # must: 5 updates; adapters of the attention alone

The base has random weights, made on the GPU: its files are empty ones of the right size, since nothing here depends on what a
model knows, and 70 billion weights need not be on a disk for it. What is learned is nothing: the reward is the length of an
answer, and hardly any answer ends early. Prints the time of an update beside the simulation's, with the calibration of this
GPU, which it makes at the end where none is named by `--gpu FILE`, and the most memory that was in use. To try the script
on a CPU: `smollm2-135m --layers 2 --no-prediction`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from arms import Figures, Options, keep
from msgspec import Struct
from one_gpu import MemoryWatch
from plot import bars

from llamarl import Job
from llamarl.bench.calibrate import calibrate
from llamarl.builders import base as base_builder
from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.builders.trainer import build_trainer
from llamarl.config.file import load_config
from llamarl.executors.executor import Executor
from llamarl.families.parameters import num_parameters, parameters
from llamarl.model.base import BaseLayout
from llamarl.model.checkpoint import Checkpoint, carry_files
from llamarl.model.expert_files import has_layouts, layouts
from llamarl.model.hf_config import carried_config
from llamarl.model.quantize import FP8, quantize_rows
from llamarl.model_spec import ModelSpec, shape_named
from llamarl.observe.callbacks import UpdateDone
from llamarl.observe.rows import read_rows
from llamarl.plan.gpus import Gpu, read_gpu
from llamarl.plan.lengths import Lengths
from llamarl.simulate.setup import SimulationSetup, make_simulation

WARM_UP = 2  # the first updates compile
HERE = Path(__file__).parent
TINY = Path(base_builder.__file__).parents[1] / "assets" / "tiny"


class Case(Struct, frozen=True):
    """A job, and what it must reach."""

    updates: int
    groups: int
    answer: int  # tokens
    pages: int
    settings: tuple[str, ...] = ()
    most_gib: float = 0.0
    most_error: float = 0.0  # of the prediction


CASES = {
    "smollm2-135m": Case(3, 2, 24, 400, ("generator.slots=16",)),
    "qwen3-8b": Case(4, 16, 1024, 8_400, ("trainer.tokens_per_pack=2048", "trainer.recompute=full"), most_gib=45),
    "qwen3-32b": Case(10, 16, 1024, 8_400, ("trainer.tokens_per_pack=1088", "trainer.recompute=none"), most_error=0.15),
    "qwen3-30b-a3b": Case(
        5, 16, 512, 4_400, ("model.lora.targets=attention", "trainer.tokens_per_pack=8192", "trainer.recompute=full")
    ),
    "llama-3.1-70b": Case(
        5, 8, 512, 2_400, ("model.base=fp8", "trainer.tokens_per_pack=4096", "trainer.recompute=full")
    ),
}
SETTINGS = (
    "model.lora.rank=32",
    "task.kind=arithmetic",
    "reward.scorer=length",
    "reward.max_chars=100000",
    "algo.zero_variance=keep",  # whatever the rewards are, everything is computed
    "generator.slots=128",
    "generator.max_prompt_tokens=64",
    "trainer.lr=1e-4",  # so that adapters soon change more than rounding does, and the probes can compare what they change
    "schedule.samples_per_group=8",
    "schedule.max_staleness=1",
    "schedule.probe_every=4",
    "evaluate.prompts=0",
    "evaluate.every=0",
    "snapshots.every=0",
    "snapshots.at_end=none",
    "engine.start_s=420",
)


def make_folder(shape: ModelSpec, folder: Path) -> None:
    """A model folder whose weights are a hole: they take no room on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(carried_config(shape, None, dtype="bfloat16")))
    carry_files(TINY, folder)
    header, at = dict[str, Any](), 0
    for one in parameters(shape).values():
        for name, size in (next(layouts(one)) if has_layouts(one) else {one.name: one.shape}).items():
            header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + 2 * prod(size)]}
            at += 2 * prod(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


@torch.no_grad()
def random_base(checkpoint: Checkpoint, layout: BaseLayout, memory: torch.Tensor) -> None:
    """Instead of `read_base`: matrices from N(0, 0.02), norms 1, biases 0, made where they stay."""
    generator = torch.Generator(memory.device).manual_seed(0)
    for name, one in parameters(layout.spec).items():
        wide = torch.ones(one.shape, dtype=layout.dtype, device=memory.device)
        if one.kind == "bias":
            wide.zero_()
        elif not one.kind.endswith("norm"):
            wide.normal_(0.0, 0.02, generator=generator)
        target = layout.tensors[name].view(memory)
        if target.dtype == FP8:
            wide, scales = quantize_rows(wide, FP8)
            layout.tensors[f"{name}_scale"].view(memory).copy_(scales[:, None])
        target.copy_(wide)


def _make_random() -> None:
    vars(base_builder)["read_base"] = random_base


def random_generator(context: BuildContext) -> Executor:
    _make_random()
    return build_generator(context)


def random_trainer(context: BuildContext) -> Executor:
    _make_random()
    return build_trainer(context)


def predicted_s(config: Any, case: Case, shape: ModelSpec, gpu: Gpu) -> float:
    """Seconds of an update by the simulation."""
    setup = SimulationSetup(
        config=config, shape=shape, gpu=gpu, answers=Lengths(f"fixed:{case.answer}"), prompt=8, gpus=1
    )
    return make_simulation(setup).run().update_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number, to try the script")
    parser.add_argument("--no-prediction", action="store_true", help="do not calibrate")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--gpu", type=Path, help="this GPU as described by `llamarl bench --calibrate`")
    args = parser.parse_intermixed_args()
    case, shape = CASES[args.case], shape_named(args.case)
    if args.layers:
        from msgspec.structs import replace

        shape = replace(shape, num_layers=args.layers)
    folder = Path(tempfile.mkdtemp(prefix="lora-"))
    try:
        make_folder(shape, folder / "model")
        own = (
            f"model.path={folder / 'model'}",
            f"schedule.updates={case.updates}",
            f"schedule.groups_per_update={case.groups}",
            f"generator.max_new_tokens={case.answer}",
            f"generator.kv_pages={case.pages}",
        )
        config = load_config(None, [*SETTINGS, *own, *case.settings, *args.settings])
        started = time.monotonic()
        ends = [started]
        with MemoryWatch() as watch:
            builders = {"generator": random_generator, "trainer": random_trainer}

            def told(done: UpdateDone) -> None:
                ends.append(time.monotonic())
                left_s = (case.updates - len(ends) + 1) * (ends[-1] - ends[-2])
                print(
                    f"update {len(ends) - 1} of {case.updates}: {ends[-1] - ends[-2]:.1f} s; {ends[-1] - started:.0f} s "
                    f"in all, about {left_s:.0f} s left",
                    flush=True,
                )

            Job(config, builders=builders, callbacks=[told]).run(folder / "run")
        rows, timings = (read_rows(folder / "run" / name) for name in ("metrics.jsonl", "timings.jsonl"))
        expected_s = 0.0
        if not args.no_prediction:
            gpu = read_gpu(args.gpu) if args.gpu else calibrate(torch.device("cuda"), 1).gpu
            expected_s = predicted_s(config, case, shape, gpu)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    timed = [row for row in timings if row.get("update", -1) >= WARM_UP]
    update_s = fmean(float(row["update_s"]) for row in timed)
    error = update_s / expected_s - 1 if expected_s else 0.0
    found = {
        "case": args.case,
        "parameters": num_parameters(shape),
        "updates": len(rows),
        "update_s": update_s,
        "compute_s": fmean(float(row.get("compute_s", 0.0)) for row in timed),
        "answer_tokens": fmean(row["answer_tokens"] for row in rows),
        "predicted_s": expected_s,
        "gpu_gib": watch.gpu_gib,
        "host_gib": watch.host_gib,
        "wall_s": time.monotonic() - started,
        "adapter_effect": max((row.get("adapter_effect", 0.0) for row in rows), default=0.0),
        "met": len(rows) >= case.updates
        and (not case.most_gib or watch.gpu_gib <= case.most_gib)
        and (not case.most_error or not expected_s or abs(error) <= case.most_error),
    }
    print(json.dumps(found, indent=1))
    args.results.mkdir(parents=True, exist_ok=True)
    asked = [f"--layers={args.layers}"] if args.layers else []
    asked += ["--no-prediction"] if args.no_prediction else [f"--gpu={args.gpu.name}"] if args.gpu else []
    options = Options(Path(), args.results, (), 0, Path(), command=(args.case, *asked, *args.settings))
    name = f"lora-{args.case}-{args.layers}" if args.layers else f"lora-{args.case}"
    keep(name, options, found, picture)


def picture(figures: Figures) -> str:
    values = {"GPU": figures["gpu_gib"], "host": figures["host_gib"]}
    size = f"{figures['parameters'] / 1e9:.2g}B"
    return bars(f"Memory of an RL job with LoRA of {figures['case']}, {size}", "GiB", values, " GiB")


if __name__ == "__main__":
    main()
