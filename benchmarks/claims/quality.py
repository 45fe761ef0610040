"""What narrow precisions cost in quality, without training: Qwen asked all test problems of GSM8K by a generator in bf16,
fp8 and int8, and how far its log-probs are from those of the bf16 weights on the same answers.

    python benchmarks/claims/quality.py [--beside 2] [KEY=VALUE ...]

The log-probs of the generator, as it runs in a job, are held against the trainer's passes in bf16; the row of bf16 shows what
the order of sums alone does. An fp8 KV cache is refused for this model: what it did is in benchmarks/results/decode.md.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import GSM8K, Figures, Options, keep, read_options, side_by_side
from asking import QWEN, right_in_gsm8k
from plot import bars

sys.path.insert(0, str(Path(__file__).parents[1]))

from logprob_gap import gaps, sample

from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.generate.limits import Precision
from llamarl.generate.prompting import prompt_tokens
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.registry import make_task
from llamarl.tasks.statistics import bootstrap
from llamarl.train.policy import ComputeSettings
from llamarl.types import Sampling

PRECISIONS = {
    "bf16": (),
    "fp8": ("generator.quantize=fp8",),
    "int8": ("generator.quantize=int8",),
}
PROBLEMS, SAMPLES = 64, 4


def file_name(precision: str) -> str:
    """bf16 was perhaps asked before, for claim 5."""
    return "on_par/before" if precision == "bf16" else f"quality/{precision.replace(' ', '-')}"


def gap(config: Config, device: torch.device) -> dict[str, float]:
    """Mean and largest |difference| over the tokens of answers sampled at T = 1."""
    folder, dtype = config.model_folder, torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer, task = Tokenizer.load(folder), make_task(config.task, config.seed)
    prompts = [prompt_tokens(tokenizer, problem) for problem in task.evaluation(PROBLEMS, "test")]
    sampling = Sampling(samples=SAMPLES, max_new_tokens=config.generator.max_new_tokens, temperature=1.0)
    groups = sample(folder, prompts, sampling, dtype, device, Precision.of(config.generator))
    found = gaps(folder, groups, ComputeSettings(device, dtype))
    return {"mean_gap": float(found.mean()), "largest_gap": float(found.max()), "tokens": len(found)}


def main() -> None:
    options = read_options(__doc__)
    model, device = options.chosen("model.path", QWEN), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chains = [partial(right_in_gsm8k, file_name(name), model, options, *how) for name, how in PRECISIONS.items()]
    right = dict(zip(PRECISIONS, side_by_side(chains, options), strict=True))
    table = {name: row_of(name, right, device, options) for name in PRECISIONS}
    keep("quality", options, {"precisions": table}, picture)


def picture(figures: Figures) -> str:
    values = {name: row["mean_gap"] for name, row in figures["precisions"].items()}
    return bars("Log-probs against bf16", "mean |difference|", values)


def row_of(name: str, right: dict[str, list[bool]], device: torch.device, options: Options) -> dict[str, Any]:
    paired = np.array(right[name], dtype=float) - np.array(right["bf16"], dtype=float)
    config = load_config(GSM8K, [*options.settings, *PRECISIONS[name]])
    row: dict[str, Any] = {
        "accuracy": float(np.mean(right[name])),
        "difference": float(paired.mean()),
        "interval": list(bootstrap(paired.tolist())),
        **gap(config, device),
    }
    low, high = row["interval"]
    print(
        f"{name:13} GSM8K {row['accuracy']:.1%} ({row['difference']:+.1%}, 95% {low:+.1%} to {high:+.1%}); log-probs: mean "
        f"|difference| {row['mean_gap']:.4f}, largest {row['largest_gap']:.2f}, over {row['tokens']:,} tokens",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
