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
