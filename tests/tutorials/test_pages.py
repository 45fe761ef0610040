"""Tutorials, recipes and the README do what they say: their code blocks run top to bottom and print what the page shows.

`make test-tutorials`. Blocks that need a GPU are skipped and counted where there is none; `LLAMARL_TEST_GPU=FOLDER` runs
them, with GSM8K and MATH (`gsm8k/` and `math/`, each with train.jsonl and test.jsonl) in that folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "scripts" / "docs" / "run_page.py"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
DATA = os.environ.get("LLAMARL_TEST_GPU")
GPU = ["--gpu", "--data", DATA] if DATA else []


def run_page(page: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    }  # as a user's would be
    command = [sys.executable, str(RUNNER), str(page.relative_to(ROOT)), *GPU]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(2400 if GPU else 900)  # a page takes a minute or two where nothing else runs; on a GPU it trains
@pytest.mark.parametrize("page", [ROOT / "README.md", *TUTORIALS, *RECIPES], ids=lambda page: page.stem)
def test_a_page_runs_top_to_bottom(page: Path) -> None:
    print(run_page(page).strip())  # how many blocks ran, and how many were skipped; pytest's -rP shows it
