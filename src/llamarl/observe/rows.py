"""Files of JSON lines. What reads them goes on where a line is damaged: nothing that a job needs is kept in them alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from llamarl.errors import InputError

_BLOCK_BYTES = 1 << 16
Row = dict[str, Any]
T = TypeVar("T")


class Rows(Generic[T]):
    """The whole rows of a file, one at a time; a torn last line is left out, a damaged one is left out and counted."""

    def __init__(self, path: Path, type: type[T]) -> None:
        self._path, self._decode = path, msgspec.json.Decoder(type).decode
        self.damaged: list[int] = []  # line numbers, once all rows were read

    def __iter__(self) -> Iterator[T]:
        self.damaged.clear()
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        return
                    try:
                        row = self._decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        self.damaged.append(number)
                    else:
                        yield row
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read: {error.strerror}") from None

    @property
    def warning(self) -> str:
        """What to tell of damaged rows; empty: nothing."""
        if not self.damaged:
            return ""
        shown = ", ".join(map(str, self.damaged[:5])) + (" ..." if len(self.damaged) > 5 else "")
        return f"{self._path}: {len(self.damaged)} damaged rows are left out (line {shown})"


def read_rows(path: Path) -> list[Row]:
    """All whole rows."""
    return list(Rows(path, Row))


def cut_rows(path: Path, keep: Callable[[Row], bool]) -> list[Row]:
    """Take back the end of the file: rows up to the last that is to be kept, damaged ones and a torn line among them.

    Returns the rows that went, in their order. Reads only as much of the file as it takes back."""
    gone: list[Row] = []
    if not path.exists():
        return gone
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        for start, line in _lines_from_the_end(file, end):
            row = _decoded(line) if line.endswith(b"\n") else None
            if row is not None:
                if keep(row):
                    break
                gone.append(row)
            end = start
        file.truncate(end)
    return gone[::-1]


def _lines_from_the_end(file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """(where it starts, line), the last one first, without reading more of the file than was asked for."""
    start, block = end, b""
    while start > 0:
        size = min(_BLOCK_BYTES, start)
        start -= size
        file.seek(start)
        block = file.read(size) + block
        first, *lines = _split(block)
        at = start + len(block)
        for line in reversed(lines):
            at -= len(line)
            yield at, line
        block = first
    if block:
        yield 0, block


def _split(block: bytes) -> list[bytes]:
    """Into lines, each with its end. Not `splitlines`, which knows other ends too."""
    parts = block.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _decoded(line: bytes) -> Row | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None
