"""A run folder is the record of one run, never of two, and never has half a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarl.controller.ledger import Visible, read_ledger
from llamarl.errors import InputError
from llamarl.observe import run_folder
from llamarl.observe.run_folder import LEDGER, METRICS, RunFolder, clear_unbegun, dated_run_folder


def test_a_new_or_empty_folder_is_taken(tmp_path: Path) -> None:
    for path in (tmp_path / "a" / "b" / "new", tmp_path / "empty"):
        path.parent.mkdir(parents=True, exist_ok=True)
        RunFolder.create(path).close()
        assert (path / METRICS).exists()


@pytest.mark.parametrize("content", ["ledger", ".hidden", "snapshots/1"])
def test_a_folder_that_holds_anything_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / content).parent.mkdir(exist_ok=True)
    (tmp_path / content).write_text("kept")
    with pytest.raises(InputError, match="is not empty; name a new folder"):
        RunFolder.create(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / content]
    assert (tmp_path / content).read_text() == "kept"


def test_what_a_job_leaves_that_was_killed_as_it_began_is_cleared(tmp_path: Path) -> None:
    RunFolder.create(tmp_path).lock.release()
    (tmp_path / ".config.yaml.partial").write_text("seed: 1\nmod")  # killed while it was written
    assert clear_unbegun(tmp_path) and not any(tmp_path.iterdir())
    assert clear_unbegun(tmp_path / "missing") and not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", ""),
        ("pkg/__init__.py", ""),
        ("pkg", None),
        ("lock", "a lock of mine"),
        ("sub/lock", ""),
        ("metrics.jsonl", "{}"),
        ("ledger/metrics.jsonl", ""),
        ("config.yaml", ""),
    ],
)
def test_what_no_killed_job_leaves_is_not_cleared(tmp_path: Path, name: str, content: str | None) -> None:
    RunFolder.create(tmp_path).close()
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    assert not clear_unbegun(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert content is None or (tmp_path / name).read_text() == content


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_nor_what_only_has_the_name(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / METRICS)
    assert not clear_unbegun(tmp_path) and (tmp_path / METRICS).lstat()


def test_nothing_is_cleared_where_a_job_is_at_work(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with pytest.raises(InputError, match=r"process \d+ on .* is at work there"):
        clear_unbegun(tmp_path)
    folder.lock.check()
    folder.close()


def test_a_finished_run_is_not_continued_by_accident(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run").close()
    with pytest.raises(InputError, match="is not empty"):
        RunFolder.create(tmp_path / "run")


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(run_folder, "AppendFile", refuse)
    with pytest.raises(InputError, match="cannot be made: Permission denied"):
        RunFolder.create(tmp_path / "run")


def test_what_was_synced_is_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    for version in range(2):
        folder.ledger.append(Visible(version))
    folder.ledger.sync()
    folder.metrics.add(0, "trainer", {"reward": 1.0})
    folder.metrics.sync()
    assert list(read_ledger(tmp_path / "run" / LEDGER)) == [Visible(0), Visible(1)]
    assert (tmp_path / "run" / METRICS).read_bytes() == b'{"update":0,"role":"trainer","reward":1.0}\n'
    folder.close()


def test_metrics_are_one_object_a_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    for update in range(3):
        folder.metrics.add(update, "trainer", {"two\nlines": 1.0, "none": float("nan")})
    folder.close()
    lines = (tmp_path / "run" / METRICS).read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [0, 1, 2]
    assert json.loads(lines[0])["none"] is None, "JSON has no NaN"


def test_every_dated_folder_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(5):
        path = dated_run_folder(tmp_path)
        os.mkdir(path)
        names.append(path.name)
    assert len(set(names)) == 5
    assert names == sorted(names)
