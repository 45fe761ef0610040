"""Triton's interpreter runs the kernels of decode attention on a CPU; where Triton is not installed, nobody can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "attention_variants.py"


def _release(package: ModuleType) -> tuple[int, ...]:
    return tuple(int(number) for number in package.__version__.split(".")[:2])


def _check_release() -> None:
    triton = pytest.importorskip("triton")
    if _release(triton) < (3, 7) and _release(np) >= (2, 4):
        pytest.skip("before 3.7 Triton's interpreter does what numpy 2.4 refuses")


def test_windows_softcaps_scales_and_partial_rotation() -> None:
    _check_release()
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "helpers.paged_attention"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", ["SmolLM2", "1B tails"])
def test_attention_kernels_compute_what_plain_pytorch_computes(case: str) -> None:
    """In a few tilings: a block inside a page, over several pages, and of several warps; long sequences cut into parts."""
    _check_release()
    command = [sys.executable, str(SCRIPT), "--tiny", f"--case={case}", "--slice=1/3"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    faults = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(faults) == 5, done.stderr
    assert not any(faults.values()), faults


DRAFTED = """
import torch
from llamarl.generate.attention import DecodeAttention
from llamarl.generate.attention_kernels import attend_pages
from llamarl.generate.kv_cache import PagedCache
from llamarl.model.quantize import FP8
from llamarl.model.rope import rope_up_to
from llamarl.model_spec import ModelSpec

shape = ModelSpec(vocab_size=8, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
                  max_positions=64)
# Slots 0, 1 and 2 hold one sequence at positions 10, 9 and 8: the row of the latest token comes first.
table = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [4, 5, 6], [0, 0, 0]], dtype=torch.int32)
slots, positions = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 9, 8, 5, 0])
for dtype in (torch.float32, FP8):
    torch.manual_seed(0)
    caches = [PagedCache(shape, 6, 4, dtype=dtype, device="cpu") for _ in range(3)]
    old = torch.randn(2, 24, 2, 16)
    for cache in caches:
        pages, within = torch.arange(24) // 4 + 1, torch.arange(24) % 4
        cache.keys(0).put(pages, within, old[0]), cache.values(0).put(pages, within, old[1])
    qkv = torch.randn(4, 1, 4, 16), torch.randn(4, 1, 2, 16), torch.randn(4, 1, 2, 16)
    rope = rope_up_to(shape, 64, torch.device("cpu"))
    expected = DecodeAttention(caches[0], table, slots, positions, rope)(0, *qkv)
    for cache, drafted in zip(caches[1:], (True, False)):
        found = attend_pages(qkv, cache.keys(0), cache.values(0), table, slots, positions, rope, drafted=drafted)
        print(float((found - expected).abs().max()))
"""


def test_copies_of_one_sequence_see_each_others_new_tokens() -> None:
    """Rows of drafts, in the order in which it matters that all new tokens are written before any is read."""
    _check_release()
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", DRAFTED], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    wide, wide_unwritten, narrow, narrow_unwritten = map(float, done.stdout.split())
    assert wide < 1e-5 and narrow < 0.02
    assert wide_unwritten > 0.05 and narrow_unwritten > 0.05, "the planted fault does not show"
