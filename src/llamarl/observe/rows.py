"""Files of JSON lines. Readers skip damaged lines: no job depends on these files alone."""

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
    """Iterates over the intact rows of a file. An incomplete last line is skipped; damaged lines are skipped and counted."""

    def __init__(self, path: Path, type: type[T]) -> None:
        self._path, self._decode = path, msgspec.json.Decoder(type).decode
        self.damaged: list[int] = []  # line numbers; complete once all rows have been read

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
        """A line about damaged rows; empty if there are none."""
        if not self.damaged:
            return ""
        shown = ", ".join(map(str, self.damaged[:5])) + (" ..." if len(self.damaged) > 5 else "")
        return f"{self._path}: {len(self.damaged)} damaged rows are left out (line {shown})"


def read_rows(path: Path) -> list[Row]:
    """All intact rows of a file."""
    return list(Rows(path, Row))


def last_row(path: Path) -> Row | None:
    """The last intact row of a file, read from its end; None if there is none."""
    try:
        with path.open("rb") as file:
            for _, line in _lines_from_the_end(file, file.seek(0, os.SEEK_END)):
                if line.endswith(b"\n") and (row := _decoded(line)) is not None:
                    return row
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return None


def cut_rows(path: Path, keep: Callable[[Row], bool]) -> list[Row]:
    """Truncate the file after the last row for which `keep` is true; damaged rows behind it go too.

    Returns the removed rows in order. Reads only the removed part of the file."""
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
    """Yield (offset, line) from the last line to the first, reading the file lazily."""
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
    """Split into lines that keep their `\\n`. Unlike `splitlines`, it splits at `\\n` only."""
    parts = block.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _decoded(line: bytes) -> Row | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None
