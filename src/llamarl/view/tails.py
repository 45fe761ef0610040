"""Readers that follow growing files of a run folder: each call returns only what is new since the last one.

A half-written end is left for the next call. A file that was cut, as after a rewind, is read again from its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from llamarl.io.record_log import read_segment, segment_files

_MARK_BYTES = 64
_CHUNK_BYTES = 4 << 20


class LineTail:
    """Follows a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._mark = path, 0, b""
        self.was_reset = False  # whether the last `read` began at the start of the file again

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (byte offset, row) of the complete lines that are new. Lines that are no JSON objects are left out."""
        self.was_reset = False
        try:
            with self._path.open("rb") as file:
                if self._at and not self._continues(file):
                    self._at, self._mark, self.was_reset = 0, b"", True
                file.seek(self._at)
                rest = b""
                while chunk := file.read(_CHUNK_BYTES):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        start, self._at = self._at, self._at + len(line) + 1
                        self._mark = (self._mark + line + b"\n")[-_MARK_BYTES:]
                        if (row := _decoded(line)) is not None:
                            yield start, row
        except FileNotFoundError:
            self.was_reset, self._at, self._mark = self._at > 0, 0, b""

    def _continues(self, file: Any) -> bool:
        """Whether the bytes before our place are still those that were read."""
        file.seek(self._at - len(self._mark))
        return bool(file.read(len(self._mark)) == self._mark)


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


class SegmentTail:
    """Follows the segments of a record log. Segments that were removed in the meantime are passed over."""

    def __init__(self, folder: Path, place: tuple[int, int] = (-1, 0)) -> None:
        self._folder = folder
        self.place = place  # segment and byte up to which records were read

    def read(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (segment, offset, record) of the new complete records, in the order of writing."""
        for path in segment_files(self._folder):
            number = int(path.name)
            if number < self.place[0]:
                continue
            start = self.place[1] if number == self.place[0] else 0
            try:
                for offset, end, record in read_segment(path, start):
                    self.place = (number, end)
                    yield number, offset, record
            except FileNotFoundError:
                continue
            self.place = max(self.place, (number, start))
