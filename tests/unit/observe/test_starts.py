"""starts.jsonl: what a resume compares its settings with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.config.file import load_config
from llamarl.observe.starts import STARTS, Starts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for run in range(2):
        Starts(tmp_path).add(load_config(None, [f"seed={run}"]), run=run, version=run, at="now")
    return tmp_path


def test_the_last_start_counts(folder: Path) -> None:
    found = Starts(folder).last()
    assert found is not None and (found.run, found.config["seed"]) == (1, 1)


@pytest.mark.parametrize(("old", "new"), [(b'"max_tokens":1024', b'"max_tokens":10'), (b'"retries":', b'"retrie":')])
def test_a_row_that_lost_bytes_is_passed_over_even_if_it_is_valid(folder: Path, old: bytes, new: bytes) -> None:
    first, last = (folder / STARTS).read_bytes().splitlines(keepends=True)
    assert old in last
    (folder / STARTS).write_bytes(first + last.replace(old, new, 1))
    found = Starts(folder).last()
    assert found is not None and found.run == 0


def test_rows_of_earlier_releases_have_no_digest(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / STARTS).read_text().splitlines()]
    (folder / STARTS).write_text("".join(json.dumps({**row, "digest": ""}) + "\n" for row in rows))
    found = Starts(folder).last()
    assert found is not None and found.run == 1


def test_files_that_were_changed_between_starts_are_known(tmp_path: Path) -> None:
    """An answer is scored by the file as it was: 1.0 before and 0.1 after may say nothing of the policy."""
    (tmp_path / "mine.py").write_text("def score(completion, answer): return 1.0")
    config = load_config(None, [f"reward.scorer={tmp_path}/mine.py:score"])
    for run in range(2):
        Starts(tmp_path).add(config, run=run, version=run, at="now")
        assert not Starts(tmp_path).several_versions()
    (tmp_path / "mine.py").write_text("def score(completion, answer): return 0.1")
    Starts(tmp_path).add(config, run=2, version=2, at="now")
    assert Starts(tmp_path).several_versions() == [f"{tmp_path}/mine.py"]
