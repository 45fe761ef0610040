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


@pytest.mark.parametrize("case", ["SmolLM2", "1B tails"])
def test_attention_kernels_compute_what_plain_pytorch_computes(case: str) -> None:
    """In a few tilings: a block inside a page, over several pages, and of several warps; long sequences cut into parts."""
    triton = pytest.importorskip("triton")
    if _release(triton) < (3, 7) and _release(np) >= (2, 4):
        pytest.skip("before 3.7 Triton's interpreter does what numpy 2.4 refuses")
    command = [sys.executable, str(SCRIPT), "--tiny", f"--case={case}", "--slice=1/3"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    faults = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(faults) == 5, done.stderr
    assert not any(faults.values()), faults
