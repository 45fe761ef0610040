"""The page of models says what the tables of the families say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_tables_of_the_page_are_those_of_the_families() -> None:
    spec = importlib.util.spec_from_file_location("families_page", ROOT / "scripts" / "docs" / "families.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "docs" / "models.md").read_text()
    assert script.families() in text and script.refused() in text, "run: python scripts/docs/families.py --write"
