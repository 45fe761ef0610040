"""Triton's interpreter runs the kernels of experts on a CPU; where Triton is not installed, nobody can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def test_kernels_of_experts_compute_what_plain_pytorch_computes() -> None:
    triton = pytest.importorskip("triton")
    if tuple(int(one) for one in triton.__version__.split(".")[:2]) < (3, 7) and np.__version__ >= "2.4":
        pytest.skip("before 3.7 Triton's interpreter does what numpy 2.4 refuses")
    command, environment = [sys.executable, "-m", "helpers.expert_kernels"], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
