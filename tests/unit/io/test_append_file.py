"""A write that fails halfway leaves no partial record in a file, and its bytes are written later."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamarl.io.append_file import AppendFile


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Limit the file size: the kernel takes only part of the write that crosses the limit, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 16])
def test_half_a_row_is_taken_back_and_written_whole_when_there_is_room(tmp_path: Path, buffer_bytes: int) -> None:
    file = AppendFile(tmp_path / "rows", buffer_bytes=buffer_bytes)
    file.append(b"first\n")
    file.flush()
    with room_for(10), pytest.raises(OSError, match="File too large"):
        file.append(b"second, which is longer\n")
        file.flush()
    assert (tmp_path / "rows").read_bytes() == b"first\n"
    file.append(b"third\n")
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"first\nsecond, which is longer\nthird\n"


def test_a_write_that_takes_a_little_at_a_time_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(tmp_path / "rows")
    whole = file._file

    class Slow:
        def write(self, data: bytes) -> int:
            return whole.write(data[:3])

    monkeypatch.setattr(file, "_file", Slow())
    file.append(b"0123456789\n")
    assert (tmp_path / "rows").read_bytes() == b"0123456789\n"
    whole.close()


def test_what_is_buffered_counts_for_the_size(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"old\n")
    file = AppendFile(tmp_path / "rows", buffer_bytes=100)
    file.append(b"new\n")
    assert (file.num_bytes, (tmp_path / "rows").stat().st_size) == (8, 4)
    file.close()
    assert (tmp_path / "rows").read_bytes() == b"old\nnew\n"
