"""How fast are long sequences trained, with which attention, and with which activations kept? On one GPU, in 200 seconds.

    python benchmarks/train_long.py [--case 1b-32k|8b-32k|1b-1k|1b-64k] [--budget 190] [--updates 3] [--json result.json]

Whole updates, compiled, as `llamarl bench train` measures them. MFU counts model operations with causal attention, against
one large matrix product measured in the same process. Variants: FlashAttention or cuDNN, and every `trainer.recompute` that
the memory may allow; with `+state` the optimizer's state is in host memory (`trainer.offload`). A variant that fails is a row
with its error. What would begin after the budget is left out and named. `--tiny` runs all on a CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from llamarl.bench.train import TrainBench, measure, prepare
from llamarl.model_spec import ModelSpec, shape_named

MODELS = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b"}
LENGTHS = {"1k": 1024, "32k": 32_768, "64k": 65_536}
TOKENS = 32_768  # of an update, or one sequence if it is longer
VARIANTS = {  # attention, recompute; the most telling ones first
    "1b-32k": ("cudnn none", "flash none", "cudnn selective", "flash full"),
    "8b-32k": ("cudnn offload", "cudnn full", "flash full", "cudnn selective+state"),
    "1b-1k": ("cudnn none", "flash none", "cudnn selective"),
    "1b-64k": ("cudnn none", "cudnn offload", "cudnn full"),
}
DEFAULT = ("8b-32k", "1b-32k", "1b-1k")
WARM_UP = 1  # updates; the first one compiles
TINY = {
    "num_layers": 3,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
}


@dataclass(frozen=True)
class Row:
    case: str
    variant: str
    update_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu_measured: float = 0.0
    memory_gib: float = 0.0
    spent_s: float = 0.0  # with building and compiling
    note: str = ""

    def __str__(self) -> str:
        figures = "            - |        - |      - |     -"
        if self.update_s:
            figures = f"{self.update_s * 1e3:13,.1f} | {self.tokens_per_s:8,.0f} | {self.mfu_measured:6.1%}"
            figures += f" | {self.memory_gib:5.1f}"
        return f"| {self.case:7} | {self.variant:22} | {figures} | {self.spent_s:5.0f} | {self.note}"


HEADER = "| case    | variant                |     update ms | tokens/s |    MFU |   GiB | all s | note"


def bench_of(case: str, variant: str, updates: int, *, tiny: bool) -> TrainBench:
    model, length = case.split("-")
    attention, how = variant.split(" ")
    tokens = LENGTHS[length] // (256 if tiny else 1)
    return TrainBench(
        model=MODELS[model],
        tokens=max(tokens, TOKENS // (256 if tiny else 1)),
        length=tokens,
        recompute=how.removesuffix("+state"),
        offload=how.endswith("+state"),
        compile=not tiny,
        updates=updates,
        device="cpu" if tiny else "cuda",
        cudnn_from=1 if attention == "cudnn" else 0,
    )


def shape_of(case: str, *, tiny: bool) -> ModelSpec:
    shape = shape_named(MODELS[case.split("-", maxsplit=1)[0]])
    return replace(shape, **TINY, head_dim=16) if tiny else shape


def measured(case: str, variant: str, updates: int, *, tiny: bool) -> Row:
    start_s = time.perf_counter()
    try:
        bench = bench_of(case, variant, updates, tiny=tiny)
        learner, documents = prepare(bench, shape_of(case, tiny=tiny))
        found = measure(bench, learner, documents, WARM_UP)
    except Exception as error:  # whatever a kernel, a compiler or the memory may say
        text = str(error).strip().splitlines() or [""]
        return Row(
            case, variant, spent_s=time.perf_counter() - start_s, note=f"{type(error).__name__}: {text[0][:120]}"
        )
    return Row(
        case,
        variant,
        found.update_s,
        found.tokens_per_s,
        found.mfu_measured,
        found.memory_gib,
        time.perf_counter() - start_s,
        f"{found.documents} x {bench.length} tokens, {found.tflops:.0f} of {found.peak_tflops:.0f} TFLOP/s",
    )


def all_rows(cases: list[str], updates: int, budget_s: float, *, tiny: bool) -> Iterator[Row]:
    """The first variant of every case, then the second ones, so that a budget that is too short leaves out the least."""
    start_s = time.perf_counter()
    for place in range(max(len(VARIANTS[case]) for case in cases)):
        for case in (one for one in cases if place < len(VARIANTS[one])):
            if time.perf_counter() - start_s > budget_s:
                yield Row(case, VARIANTS[case][place], note=f"left out: the budget of {budget_s:g} s is spent")
                continue
            yield measured(case, VARIANTS[case][place], updates, tiny=tiny)
            gc.collect()
            if not tiny:
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", default=[], choices=list(VARIANTS), help="default: all but 1b-64k")
    parser.add_argument("--budget", type=float, default=190.0, help="seconds; what would begin later is left out")
    parser.add_argument("--updates", type=int, default=3, help="updates that are timed, after one that compiles")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, start_s = list[Row](), time.perf_counter()
    print(HEADER)
    for row in all_rows(arguments.case or list(DEFAULT), arguments.updates, arguments.budget, tiny=arguments.tiny):
        rows.append(row)
        print(row, flush=True)
    device = "CPU" if arguments.tiny else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device}, {time.perf_counter() - start_s:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
