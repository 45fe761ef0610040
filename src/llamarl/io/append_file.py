"""An append-only file that a failed write never leaves with a partial record.

All records of a run are written through it. If the disk is full, or takes only half of a row, the file stays as it was before
that row. A power cut can still truncate the end; readers recognize that.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec


class AppendFile:
    """Appends bytes to the end of `path`.

    Without a buffer, appended bytes survive the death of this process; after `sync`, also a crash of the machine.
    Bytes of a failed write stay in memory, and the next `append`, `flush`, `sync` or `close` tries again.
    """

    def __init__(self, path: Path, *, buffer_bytes: int = 0, exclusive: bool = False) -> None:
        self.path = path
        self._file = path.open("xb" if exclusive else "ab", buffering=0)
        self._stored_bytes = os.fstat(self._file.fileno()).st_size
        self._buffer_bytes, self._pending = buffer_bytes, bytearray()

    @property
    def num_bytes(self) -> int:
        """Size of the file, including bytes that are not yet written."""
        return self._stored_bytes + len(self._pending)

    def append(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) > self._buffer_bytes:
            self.flush()

    def append_json(self, value: Any) -> None:
        self.append(msgspec.json.encode(value) + b"\n")

    def flush(self) -> None:
        """Write all pending bytes to the operating system, or none of them and raise OSError."""
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
        """Write all bytes to disk."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()
