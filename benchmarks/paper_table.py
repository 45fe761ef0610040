"""The paper's table of step times, predicted from its 8B row alone, and how much what it does not publish matters.

    python benchmarks/paper_table.py [--json result.json]

Median and spread of the answers' lengths are fitted so that both times of the 8B row come out; the GPU's constants are those
of `llamarl plan`, and nothing else is fitted. The second table changes one assumption at a time, and fits the 8B row anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from msgspec.structs import replace

from llamarl.errors import InputError
from llamarl.plan.paper import PUBLISHED, Assumed, Predicted, fit_answers, predict_row

BASE = Assumed()
CHANGES: dict[str, Assumed] = {
    "as assumed": BASE,
    "512 answers an update": replace(BASE, answers=512),
    "8,192 answers an update": replace(BASE, answers=8192),
    "answers of at most 4,096 tokens": replace(BASE, limit=4096),
    "prompts of 2,048 tokens": replace(BASE, prompt=2048),
    "the baseline shards its optimizer over all GPUs (ZeRO)": replace(BASE, state_bytes=2.0),
    "the baseline holds 24 bytes per parameter": replace(BASE, state_bytes=24.0),
    "steps between hosts take the baseline 3 times as long": replace(BASE, host_factor=3.0),
    "the same, 2.5 times": replace(BASE, host_factor=2.5),
    "the same, 6 times": replace(BASE, host_factor=6.0),
    "the baseline decodes without CUDA graphs: 50 us more a layer": replace(BASE, eager_layer_s=50e-6),
    "training takes both 1.5 times as long": replace(BASE, train_factor=1.5),
    "LlamaRL's generators in fp8 throughout, the baseline in bf16": replace(BASE, async_precision="fp8"),
}


def predict(assumed: Assumed) -> list[Predicted]:
    answers = fit_answers(assumed)
    print(f"fitted on the 8B row: {answers.spec} (mean {answers.mean:.0f})\n")
    return [predict_row(row, answers, assumed) for row in PUBLISHED]


def error(found: float, published: float) -> str:
    return f"{found / published - 1:+.0%}"


def print_rows(rows: list[Predicted]) -> None:
    print("| model | GPUs | synchronous, s | published | | LlamaRL, s | published | | gain | published | | layouts |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for one in rows:
        row = one.row
        print(
            f"| {row.model} | {row.gpus} | {one.sync_s:.1f} | {row.sync_s} | {error(one.sync_s, row.sync_s)} "
            f"| {one.async_s:.1f} | {row.async_s} | {error(one.async_s, row.async_s)} "
            f"| {one.gain:.2f} | {row.gain:.2f} | {error(one.gain, row.gain)} "
            f"| baseline m = {one.m}; {one.theta:.0%} train, generators {one.generator} |"
        )


def sensitivity() -> dict[str, list[float]]:
    print("\n| what is assumed | gain 8B (fitted) | 70B | 405B |\n|---|---:|---:|---:|")
    gains: dict[str, list[float]] = {}
    for name, assumed in CHANGES.items():
        try:
            answers = fit_answers(assumed)
        except InputError:
            print(f"| {name} | no lengths explain the 8B row | | |")
            continue
        gains[name] = [predict_row(row, answers, assumed).gain for row in PUBLISHED]
        print(f"| {name} | {' | '.join(f'{gain:.2f}' for gain in gains[name])} |")
    print(f"| published | {' | '.join(f'{row.gain:.2f}' for row in PUBLISHED)} |")
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = predict(BASE)
    print_rows(rows)
    gains = sensitivity()
    if args.json:
        found = {one.row.model: [one.sync_s, one.async_s, one.gain] for one in rows}
        args.json.write_text(json.dumps({"predicted": found, "sensitivity": gains}, indent=2) + "\n")


if __name__ == "__main__":
    main()
