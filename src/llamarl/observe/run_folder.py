"""The run folder: the record of a job. Everything that reports reads it; nothing else knows state."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from llamarl.errors import InputError
from llamarl.segments import SegmentWriter

LEDGER = "ledger"
EVENTS = "events"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
TIMINGS = "timings.jsonl"
TIMELINE = "timeline.json"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
GROUPS = "groups"
SNAPSHOTS = "snapshots"
LOGS = "logs"


def log_file(run: Path, executor: str) -> Path:
    """What an executor printed, and the tracebacks of what failed in it."""
    return run / LOGS / f"{executor.replace('/', '-')}.log"


class AppendFile:
    """Lines that are only ever added, and on disk after `sync`."""

    def __init__(self, path: Path, *, buffered: bool = False) -> None:
        """Unbuffered, what was appended survives the death of this process; `sync` makes it survive that of the machine."""
        self._file: BinaryIO = path.open("ab") if buffered else path.open("ab", buffering=0)

    def append(self, line: bytes) -> None:
        self._file.write(line)

    def append_json(self, value: Any) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


class RunFolder:
    """Where the record of one job is written. `create` makes a new one, `reopen` goes on with one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = path / GROUPS
        self.snapshots = path / SNAPSHOTS
        self.ledger = SegmentWriter(path / LEDGER)
        self.events = AppendFile(_unused(path / EVENTS), buffered=True)  # many, and only for looking back
        self.metrics = AppendFile(path / METRICS)
        self.evaluations = AppendFile(path / EVALUATIONS)
        self.timings = AppendFile(path / TIMINGS)

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """One that holds anything already is refused, so that no record is ever mixed with another."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                hint = "; to go on with that run, add --resume" if (path / LEDGER).exists() else ""
                raise InputError(f"--run {path}: is not empty; name a new folder{hint}")
            return cls(path)
        except OSError as error:
            raise InputError(f"--run {path}: cannot be made: {error.strerror}") from None

    @classmethod
    def reopen(cls, path: Path, version: int) -> RunFolder:
        """Go on from the snapshot of `version`: metrics of later updates are taken back, since they are made again."""
        _keep_rows(path / METRICS, lambda row: row["update"] < version)
        _keep_rows(path / EVALUATIONS, lambda row: row["version"] <= version)
        return cls(path)

    def write_config(self, text: str) -> None:
        (self.path / CONFIG).write_text(text, encoding="utf-8")

    def write_summary(self, summary: Any) -> None:
        encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        (self.path / SUMMARY).write_bytes(encoded + b"\n")

    def log(self, name: str, text: str) -> Path:
        """Add to a log, of an executor or of something else; where it lies."""
        path = log_file(self.path, name)
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")
        return path

    def close(self) -> None:
        for file in (self.ledger, self.events, self.metrics, self.evaluations, self.timings):
            file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a file of JSON lines; a torn last line is left out."""
    try:
        *lines, _torn = path.read_bytes().split(b"\n")
        return [msgspec.json.decode(line) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    rows = [row for row in read_rows(path) if keep(row)]
    replacement = path.with_name(f".{path.name}.partial")
    replacement.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    replacement.replace(path)


def _unused(path: Path) -> Path:
    """`events`, and `events.1` and so on for every time the job was resumed: each replays one controller."""
    candidates = (path.with_name(path.name + (f".{number}" if number else "")) for number in range(10_000))
    return next(candidate for candidate in candidates if not candidate.exists())


def dated_run_folder(base: Path = Path("runs")) -> Path:
    """A name of its own for every run, in order of time."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    candidates = (base / (stamp + (f"_{number}" if number else "")) for number in range(1000))
    return next(path for path in candidates if not path.exists())
