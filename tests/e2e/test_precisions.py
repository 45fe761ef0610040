"""A job in every precision of its generator: versions arrive, are narrowed, and the log-probs say how near they stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.killing import TINY

from llamarl import Job
from llamarl.config.file import load_config


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        (["generator.quantize=int8"], 1e-5, 0.05),
        (["generator.quantize=fp8", "generator.kv_cache=fp8"], 1e-3, 0.5),
        (["generator.quantize=fp8", "generator.dtype=bfloat16"], 1e-3, 0.5),  # which travels as fp8
        (["model.path=tiny-moe", "generator.quantize=int8"], 1e-5, 0.05),
        (["model.path=tiny-moe", "generator.quantize=fp8"], 1e-3, 0.5),
        (["generator.dtype=float16", "trainer.dtype=float16"], 1e-7, 0.01),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_the_gap_is_that_of_the_precision(settings: list[str], least: float, most: float, tmp_path: Path) -> None:
    run = [
        *TINY,
        "engine.kind=inline",
        "schedule.updates=3",
        "schedule.probe_every=1",
        "evaluate.prompts=0",
        "trainer.lr=1e-3",
        "trainer.warmup_updates=0",
    ]
    Job(load_config(None, [*run, *settings])).run(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["logprob_gap"] for row in rows]
    assert len(gaps) == 3
    assert least < max(gaps) < most, "weights that were not narrowed anew would be far from the trainer's"
