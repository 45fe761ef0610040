"""A file that only grows, and is never torn by a write that fails halfway.

Every record of a run is written through here: a disk that is full for a moment, or takes only half of a row, leaves the
file as it was before that row. A power cut can still tear the end; whoever reads a file knows how to recognize that.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec


class AppendFile:
    """Bytes added to the end of `path`.

    Without a buffer, what was appended survives the death of this process; `sync` makes it survive that of the machine.
    What a failed write could not store stays in memory, and is tried again by the next `append`, `flush`, `sync` or `close`.
    """

    def __init__(self, path: Path, *, buffer_bytes: int = 0, exclusive: bool = False) -> None:
        self.path = path
        self._file = path.open("xb" if exclusive else "ab", buffering=0)
        self._stored_bytes = os.fstat(self._file.fileno()).st_size
        self._buffer_bytes, self._pending = buffer_bytes, bytearray()

    @property
    def num_bytes(self) -> int:
        """Size of the file with everything that was appended."""
        return self._stored_bytes + len(self._pending)

    def append(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) > self._buffer_bytes:
            self.flush()

    def append_json(self, value: Any) -> None:
        self.append(msgspec.json.encode(value) + b"\n")

    def flush(self) -> None:
        """Hand all bytes to the operating system: all of them, or none and OSError."""
        data, written = bytes(self._pending), 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._stored_bytes)
            raise
        self._stored_bytes += written
        self._pending.clear()

    def sync(self) -> None:
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()
