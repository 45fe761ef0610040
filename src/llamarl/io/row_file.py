"""Rows of one length in a file: what is too large for a message, written by several processes and read by others.

The writers fill a file beside the final one, each its own rows; when all of them are done, one of them renames it. So a file
with the final name is always whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]  # [rows, bytes of each]
Numbers = NDArray[np.int64]

_HEADER = Struct("<8sQQ")  # magic, number of rows, bytes of each
_MAGIC = b"LLRLROWS"


class BadRowFile(Exception):
    """A file that is missing, cut short, or of another size than its reader expects."""


class RowFileWriter:
    """Writes some of the file's rows, in any order. `finish` makes the file visible; one of the writers calls it, after all
    of them have closed theirs."""

    def __init__(self, path: Path, row_bytes: int) -> None:
        self._path, self._row_bytes = path, row_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(_partial(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def put(self, numbers: Numbers, rows: Rows) -> None:
        """Write rows to the places with these numbers."""
        for first, part in _runs(numbers):
            data, at = np.ascontiguousarray(rows[part]).data.cast("B"), _HEADER.size + first * self._row_bytes
            while data:
                written = os.pwrite(self._file, data, at)
                data, at = data[written:], at + written

    def close(self) -> None:
        os.close(self._file)

    def finish(self, num_rows: int) -> None:
        with _partial(self._path).open("r+b") as file:
            file.truncate(_HEADER.size + num_rows * self._row_bytes)  # an earlier attempt may have been longer
            file.write(_HEADER.pack(_MAGIC, num_rows, self._row_bytes))
        _partial(self._path).rename(self._path)


class RowFile:
    """Reads rows by their numbers. BadRowFile unless the file has exactly so many rows."""

    def __init__(self, path: Path, num_rows: int) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise BadRowFile(f"{path}: {error.strerror}") from None
        head = self._file.read(_HEADER.size)
        magic, found, self.row_bytes = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0)
        size = os.fstat(self._file.fileno()).st_size
        if magic != _MAGIC or found != num_rows or size != _HEADER.size + num_rows * self.row_bytes:
            self._file.close()
            raise BadRowFile(f"{path}: {found} rows in {size} bytes, where {num_rows} rows belong")

    def take(self, numbers: Numbers) -> Rows:
        """The rows with these numbers, in their order."""
        found = np.empty((len(numbers), self.row_bytes), dtype=np.uint8)
        for first, part in _runs(numbers):
            data, at = found[part].data.cast("B"), _HEADER.size + first * self.row_bytes
            while data:
                read = os.preadv(self._file.fileno(), [data], at)
                if not read:
                    raise BadRowFile(f"{self._file.name}: ends before row {first}")
                data, at = data[read:], at + read
        return found

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _runs(numbers: Numbers) -> Iterator[tuple[int, slice]]:
    """Consecutive numbers that follow one another: the first of each run, and its place among all."""
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for first, end in pairwise(edges):
        if end > first:
            yield int(numbers[first]), slice(first, end)
