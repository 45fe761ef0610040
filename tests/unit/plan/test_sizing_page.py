"""docs/sizing.md is what the planner says: its words, and the rows that are cheap to compute again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CHEAP = [("llama-3.2-1b", 1, 0), ("llama-3.1-8b", 8, 0), ("llama-3.1-8b", 1, 32), ("llama-3.1-405b", 1, 0)]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("sizing_page", ROOT / "scripts" / "docs" / "sizing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_planner(script: Any) -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    assert text.startswith(script.ABOUT), "run: python scripts/docs/sizing.py"
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    for model, gpus, rank in CHEAP:
        title = f"{model}, {f'LoRA, rank {rank}' if rank else 'all weights'}"
        row = script.row(model, gpus, rank)
        assert row in sections[title].splitlines(), "run: python scripts/docs/sizing.py"


def test_every_model_has_a_row_for_every_number_of_gpus(script: Any) -> None:
    text = (ROOT / "docs" / "sizing.md").read_text()
    rows = [
        line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ") and not line.startswith("| GPUs")
    ]
    expected = [f"| {gpus:,}" for gpus in script.SIZES] * 2 * len(script.MODELS)
    assert rows == expected
