"""Do generator and trainer agree on log-probs with LoRA adapters, in every precision?

    python benchmarks/lora_gap.py MODEL [KEY=VALUE ...]

Starts jobs from random adapters that change what the model says, and lets them measure themselves by their probes: the mean
|difference| of the log-probs of the sampled tokens, of the base's alone, and of what the adapters change.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

import torch

from llamarl import Job
from llamarl.config import LoraConfig, model_folder
from llamarl.config.file import load_config
from llamarl.errors import LlamaRLError
from llamarl.families.adapters import LORA_B, adapter_parameters
from llamarl.model.adapter_folder import save_adapter
from llamarl.model.checkpoint import check_headers
from llamarl.observe.rows import read_rows

PRECISIONS = {
    "fp32": ("generator.dtype=float32", "trainer.dtype=float32"),
    "bf16": ("generator.dtype=bfloat16", "trainer.dtype=bfloat16"),
    "fp16 operands": ("generator.dtype=float16", "trainer.dtype=float16"),
    "bf16, adapters merged": ("generator.dtype=bfloat16", "trainer.dtype=bfloat16", "generator.lora=merged"),
    "bf16 base, generator quantizes it to fp8": ("generator.dtype=bfloat16", "generator.quantize=fp8"),
    "bf16 base, fp8 cache": ("generator.dtype=bfloat16", "generator.kv_cache=fp8"),
    "fp8 base on both sides": ("generator.dtype=bfloat16", "trainer.dtype=bfloat16", "model.base=fp8"),
}
COLUMNS = ("logprob_gap", "adapter_base_gap", "adapter_effect", "adapter_effect_gap")
SETTINGS = (
    "trainer.lr=1e-7",
    "trainer.compile='off'",
    "schedule.updates=4",
    "schedule.probe_every=1",
    "evaluate.prompts=0",
    "snapshots.every=0",
    "snapshots.at_end=none",
)


def random_adapter(model: Path, folder: Path, lora: LoraConfig, size: float) -> None:
    """Adapters as after training: A as at the start, B of about this size."""
    shape, generator = check_headers(model), torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(one.shape, generator=generator) * (size if f".{LORA_B}." in name else one.shape[1] ** -0.5)
        for name, one in adapter_parameters(shape, lora).items()
    }
    save_adapter(tensors, lora, shape, folder, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--size", type=float, default=0.01, help="of the numbers in B")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    lora = LoraConfig(rank=args.rank, alpha=float(args.rank))
    print("| precision | log-probs | base alone | effect of the adapters | difference of the effect |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found)
        random_adapter(model_folder(str(args.model)), folder / "adapter", lora, args.size)
        own = [f"model.path={args.model}", f"model.adapter={folder / 'adapter'}"]
        own += [f"model.lora.rank={args.rank}", f"model.lora.alpha={args.rank}"]
        for number, (name, precision) in enumerate(PRECISIONS.items()):
            run = folder / str(number)
            try:
                Job(load_config(None, [*SETTINGS, *own, *precision, *args.settings])).run(run)
            except LlamaRLError as error:  # the probes stop a job whose two sides differ too much; the others go on
                print(f"| {name} | {error} |", flush=True)
                continue
            rows = [row for row in read_rows(run / "metrics.jsonl") if all(key in row for key in COLUMNS)]
            print(
                f"| {name} | " + " | ".join(f"{fmean(row[key] for row in rows):.2g}" for key in COLUMNS) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
