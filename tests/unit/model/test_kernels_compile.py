"""Triton compiles every kernel for a GPU that is not there; where Triton is not installed, nobody can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_SHARED = 227 * 1024  # bytes of shared memory that a program may have on a Hopper GPU


def test_every_kernel_compiles_and_fits_a_processor(tmp_path: Path) -> None:
    """What Triton's interpreter accepts, its compiler may refuse."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.compiled_kernels"],
        check=False,
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    shared = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(shared) > 30 and max(shared.values()) <= MOST_SHARED, shared
