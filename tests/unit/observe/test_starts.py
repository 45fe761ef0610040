"""starts.jsonl: what a resume compares its settings with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.config.file import load_config
from llamarl.observe.starts import STARTS, Starts
from llamarl.tasks.dataset_files import files_of


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


def test_data_that_were_changed_between_starts_are_known(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config, starts = load_config(None, ["task.kind=jsonl", f"task.path={data}"]), Starts(tmp_path)
    assert files_of(config) == [data]
    starts.add(config, [data], run=0, version=0, at="now")
    assert not list(starts.changed_files(config, [data]))
    with data.open("a") as file:
        file.write('{"prompt": "1+2=", "answer": "3"}\n')
    (told,) = starts.changed_files(config, [data])
    assert told.startswith(f"NOTE: {data} has changed since this run was last started")
    starts.add(config, [data], run=1, version=1, at="now")
    assert not list(starts.changed_files(config, [data])) and starts.several_versions() == [str(data)]


def test_the_files_of_a_job_are_those_of_all_its_parts_and_rows(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.jsonl", "rows.jsonl", "test.jsonl", "two.jsonl")]
    for file in files:
        file.write_text("{}\n")
    one, rows, test, two = files
    parts = [f"{{kind: jsonl, path: {one}, test_path: {test}}}", f"{{kind: jsonl, path: {two}}}", "{kind: arithmetic}"]
    config = load_config(
        None, ["task.kind=mixture", f"task.parts=[{', '.join(parts)}]", f"sft.path={rows}", "sft.share=0.5"]
    )
    assert files_of(config) == files
    assert not files_of(load_config(None, []))
