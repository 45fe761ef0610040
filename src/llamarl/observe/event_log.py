"""The controller's event log: compressed JSON lines (`zcat events.jsonl.gz`), one file per start of the job.

Only `llamarl replay` reads it; `--resume` does not. So its end may be missing after a crash, and it stops growing once it
has reached `observe.events_mb`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from llamarl.controller.replay import LOG_FULL
from llamarl.errors import InputError
from llamarl.io.append_file import AppendFile

EVENTS = "events"
_SUFFIX = ".jsonl.gz"
_GZIP = 31  # zlib's window bits for a gzip container
_MB = 1 << 20
_BUFFER_BYTES = 1 << 16
_READ_BYTES = 1 << 16


class EventLog:
    """Writes one event log. `max_mb` limits the size of all logs of a run; once it is reached, `full` is true and events
    are ignored."""

    def __init__(self, path: Path, max_mb: int) -> None:
        others_bytes = sum(file.stat().st_size for file in event_files(path.parent).values())
        self._file = AppendFile(path, buffer_bytes=_BUFFER_BYTES)
        self._compress = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        self._max_bytes = max_mb * _MB - others_bytes
        self.full = self._max_bytes <= 0

    def append_json(self, value: Any) -> None:
        if not self.full:
            self._file.append(self._compress.compress(msgspec.json.encode(value) + b"\n"))

    def flush(self) -> None:
        """Write everything out, so that it survives the death of this process. Ends the log if it is too large."""
        if not self.full:
            self.full = self._file.num_bytes >= self._max_bytes
            last = self._compress.compress(LOG_FULL + b"\n") if self.full else b""
            self._file.append(last + self._compress.flush(zlib.Z_FINISH if self.full else zlib.Z_SYNC_FLUSH))
            self._file.flush()

    def close(self) -> None:
        if not self.full:
            self._file.append(self._compress.flush(zlib.Z_FINISH))
            self.full = True
        self._file.close()


def event_files(folder: Path) -> dict[int, Path]:
    """Maps the number of each start of the job to its event log."""
    found = {}
    for path in folder.glob(f"{EVENTS}*{_SUFFIX}"):
        number = path.name.removeprefix(EVENTS).removesuffix(_SUFFIX).removeprefix(".") or "0"
        if number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def event_file(folder: Path, run: int) -> Path:
    return folder / f"{EVENTS}{f'.{run}' if run else ''}{_SUFFIX}"


def read_events(path: Path) -> Iterator[bytes]:
    """Yield the lines of an event log, up to the point where a crash truncated it."""
    decompress, rest = zlib.decompressobj(_GZIP), b""
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                *lines, rest = (rest + decompress.decompress(block)).split(b"\n")
                yield from lines
    except zlib.error:
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
