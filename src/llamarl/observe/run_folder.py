"""The run folder: the record of a job. Everything that reports reads it; nothing else knows state."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from llamarl.errors import InputError

LEDGER = "ledger"
EVENTS = "events"
METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
TIMELINE = "timeline.json"
SUMMARY = "summary.json"
CONFIG = "config.yaml"


class AppendFile:
    """Lines that are only ever added; in the hands of the system at `flush`, on disk at `sync`."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab")

    def append(self, line: bytes) -> None:
        self._file.write(line)

    def append_json(self, value: Any) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


class RunFolder:
    def __init__(self, path: Path) -> None:
        """A new folder; one that holds a run already is refused, so that no record is ever mixed with another."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--run {path}: cannot be made: {error.strerror}") from None
        if any(path.iterdir()):
            raise InputError(f"--run {path}: is not empty; name a new folder")
        self.path = path
        self.ledger = AppendFile(path / LEDGER)
        self.events = AppendFile(path / EVENTS)
        self.metrics = AppendFile(path / METRICS)
        self.timings = AppendFile(path / TIMINGS)

    def write_config(self, text: str) -> None:
        (self.path / CONFIG).write_text(text, encoding="utf-8")

    def write_summary(self, summary: Any) -> None:
        encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        (self.path / SUMMARY).write_bytes(encoded + b"\n")

    def snapshot(self, version: int) -> Path:
        return self.path / "snapshots" / str(version)

    def flush(self) -> None:
        for file in (self.events, self.metrics, self.timings):
            file.flush()

    def close(self) -> None:
        for file in (self.ledger, self.events, self.metrics, self.timings):
            file.close()


def dated_run_folder(base: Path = Path("runs")) -> Path:
    """A name of its own for every run, in order of time."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    candidates = (base / (stamp + (f"_{number}" if number else "")) for number in range(1000))
    return next(path for path in candidates if not path.exists())
