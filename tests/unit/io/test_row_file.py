"""Rows that several writers put into one file are read back by their numbers; anything else is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamarl.io.row_file import BadRowFile, RowFile, RowFileWriter

ROWS = np.arange(60, dtype=np.uint8).reshape(12, 5)


def write(path: Path) -> Path:
    """Two writers, each with its own rows."""
    numbers = np.array([7, 8, 9, 0, 1, 2, 3, 11, 10, 4, 5, 6])
    writers = [RowFileWriter(path, 5), RowFileWriter(path, 5)]
    for writer, part in zip(writers, (slice(0, 7), slice(7, 12)), strict=True):
        writer.put(numbers[part], ROWS[numbers[part]])
        writer.close()
    assert not path.exists(), "a file that is not whole has no name"
    writers[0].finish(12)
    return path


def test_rows_come_back_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    wanted = np.array([3, 4, 5, 0, 0, 11])
    with RowFile(write(tmp_path / "batches/0"), 12) as reader:
        assert reader.row_bytes == 5
        assert np.array_equal(reader.take(wanted), ROWS[wanted])
        assert reader.take(wanted[:0]).shape == (0, 5)
    assert [one.name for one in (tmp_path / "batches").iterdir()] == ["0"]


def test_a_longer_attempt_that_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    died = RowFileWriter(tmp_path / "0", 5)
    died.put(np.arange(20), np.full((20, 5), 9, dtype=np.uint8))
    died.close()
    with RowFile(write(tmp_path / "0"), 12) as reader:
        assert np.array_equal(reader.take(np.arange(12)), ROWS)


@pytest.mark.parametrize("fault", ["missing", "other rows", "cut short", "not rows"])
def test_a_file_that_is_not_what_it_should_be_is_refused(fault: str, tmp_path: Path) -> None:
    path = write(tmp_path / "0")
    if fault == "missing":
        path.unlink()
    elif fault == "cut short":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "not rows":
        path.write_bytes(b"x" * 100)
    with pytest.raises(BadRowFile, match=str(path)):
        RowFile(path, 13 if fault == "other rows" else 12)
