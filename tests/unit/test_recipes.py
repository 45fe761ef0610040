"""Recipes name jobs that `llamarl train` takes as they stand, settings that exist, and figures that were measured."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llamarl.config.file import load_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SOURCES = [
    ROOT / "docs" / "results.md",
    *(ROOT / "benchmarks" / "results").glob("*.md"),
    ROOT / "benchmarks" / "README.md",
]
_JOB = re.compile(r"^\| job \| \[examples/\S+\]\(\.\./\.\./(examples/\S+\.yaml)\) \|$", re.MULTILINE)
_FIGURE = re.compile(r"\d[\d,]*\.?\d*%?")


def by_name(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", RECIPES, ids=by_name)
def test_a_recipe_has_one_job_that_can_be_read(page: Path) -> None:
    jobs = _JOB.findall(page.read_text())
    assert len(jobs) == 1
    load_config(ROOT / jobs[0])


@pytest.mark.parametrize("page", [*RECIPES, *TUTORIALS], ids=by_name)
def test_settings_of_printed_commands_exist_also_where_no_test_runs_them(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"^llamarl (?:train|sft) (examples/\S+\.yaml .*?)(?:\s+#.*)?$", text, re.MULTILINE):
        path, *words = shlex.split(line)
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        load_config(ROOT / path, settings)


@pytest.mark.parametrize("page", RECIPES, ids=by_name)
def test_every_expected_figure_stands_where_figures_are_measured(page: Path) -> None:
    expected = page.read_text().partition("## Result to expect\n")[2].partition("\n## ")[0]
    expected = re.sub(r"```.*?```|`[^`]*`|\[[^\]]*\]\([^)]*\)|<!--.*?-->", "", expected, flags=re.DOTALL)
    assert expected.strip()
    measured = set(_FIGURE.findall(" ".join(source.read_text() for source in SOURCES)))
    invented = {figure.rstrip(".,") for figure in _FIGURE.findall(expected)} - {
        figure.rstrip(".,") for figure in measured
    }
    assert not invented, f"{page.name}: figures that no page of results has"
