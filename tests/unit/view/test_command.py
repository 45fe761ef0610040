"""`llamarl view`: what a user can do wrong is one line, and --out writes a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.made_runs import Shape, make_run


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["nothing"], "nothing: no such run folder"),
        (["."], "holds no run"),
        (["run", "run"], "the same run folder is named twice"),
        (["run", "--gpu", "h1000"], "--gpu h1000: unknown; did you mean 'h100'?"),
        (["run", "--out", "no/such/page.html"], "--out no/such/page.html: cannot be written"),
        ([], "RUN"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", Shape(updates=1))
    found = llamarl("view", *args)
    assert found.code == 2 and told in found.err and found.err.count("\n") == 1


def test_a_page_is_written(tmp_path: Path) -> None:
    make_run(tmp_path / "run", Shape(updates=2))
    found = llamarl("view", tmp_path / "run", "--out", tmp_path / "page.html")
    assert found.code == 0 and "page.html: 0." in found.out
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
