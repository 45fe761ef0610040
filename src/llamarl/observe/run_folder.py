"""The run folder: the complete record of a job, and the only source of its reports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from llamarl.config import ObserveConfig
from llamarl.controller.ledger_file import LedgerFile
from llamarl.errors import InputError
from llamarl.io.append_file import AppendFile
from llamarl.observe.event_log import EventLog, event_file, event_files
from llamarl.observe.metrics_file import MetricsFile
from llamarl.observe.rollout_log import ROLLOUTS, RolloutLog
from llamarl.observe.rows import Row, cut_rows, read_rows
from llamarl.observe.run_lock import LOCK, RunLock, is_lock, refuse_locked

LEDGER = "ledger"
CURRICULUM = "curriculum"
ROW_SHARE = "row_share"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
TIMINGS = "timings.jsonl"
TIMELINE = "timeline.json"
SPANS = "spans.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
GROUPS = "groups"
SNAPSHOTS = "snapshots"
BATCHES = "batches"
LOGS = "logs"
_FIRST_FILES = {METRICS, EVALUATIONS, TIMINGS, SPANS, event_file(Path(), 0).name}
_FIRST_FOLDERS = {LEDGER, ROLLOUTS, *(f"{ROLLOUTS}/{name}" for name in (GROUPS, "index"))}
_PARTIAL_CONFIG = f".{CONFIG}.partial"
_DEFAULT = ObserveConfig()


def log_file(run: Path, executor: str) -> Path:
    """Path of an executor's log: its output, and tracebacks of user code that failed in it."""
    return run / LOGS / f"{executor.replace('/', '-')}.log"


def refuse_used(path: Path) -> None:
    """Raises InputError for a path that cannot be made a new run folder, since something is there."""
    try:
        is_file, is_used = path.exists() and not path.is_dir(), path.is_dir() and any(path.iterdir())
    except OSError as error:
        raise InputError(f"--run {path}: cannot be made: {error.strerror}") from None
    if is_file:
        raise InputError(f"--run {path}: is a file; name a new folder")
    if is_used:
        refuse_locked(path)
        hint = "; to go on with that run, add --resume" if (path / LEDGER).exists() else ""
        raise InputError(f"--run {path}: is not empty; name a new folder{hint}")


def no_run_to_resume(path: Path) -> InputError:
    return InputError(f"--resume: {path} holds no run (no {CONFIG} there)")


def clear_unbegun(path: Path) -> bool:
    """Whether nothing was recorded there yet: the folder is missing, or holds no more than the empty files of a job that was
    killed as it began. Those are removed."""
    refuse_locked(path)
    if not path.exists():
        return True
    if not path.is_dir() or _records(path):
        return False
    if any(path.iterdir()):
        lock = RunLock(path)  # nobody else begins there meanwhile
        try:
            if not _records(path):
                for one in sorted(path.rglob("*"), reverse=True):  # what is in a folder comes before it
                    one.rmdir() if one.is_dir() else one.unlink()
        finally:
            lock.release()
    return not any(path.iterdir())


def _records(path: Path) -> bool:
    """Whether a folder holds anything but what a job makes before it records its settings."""
    return not all(_comes_first(one, str(one.relative_to(path))) for one in path.rglob("*"))


def _comes_first(path: Path, name: str) -> bool:
    if path.is_symlink() or not path.is_file():
        return path.is_dir() and not path.is_symlink() and name in _FIRST_FOLDERS
    if name == LOCK:
        return is_lock(path)
    return name == _PARTIAL_CONFIG or (name in _FIRST_FILES and not path.stat().st_size)


class RunFolder:
    """Writes the record of one job, as its only owner. `create` makes a new folder, `reopen` continues an old one."""

    def __init__(
        self,
        path: Path,
        lock: RunLock,
        roles: Sequence[str],
        settings: ObserveConfig,
        updates: int,
        version: int = 0,
        last_run: int = -1,
    ) -> None:
        self.path, self.lock = path, lock
        self.groups = path / GROUPS
        self.snapshots = path / SNAPSHOTS
        self.ledger = LedgerFile(path / LEDGER)
        self.metrics = MetricsFile(path / METRICS, roles, version)
        self.evaluations = AppendFile(path / EVALUATIONS)
        self.timings = AppendFile(path / TIMINGS)
        self.spans = AppendFile(path / SPANS)
        self.run = 1 + max([last_run, *event_files(path)])  # number of this start of the job
        self.events = EventLog(event_file(path, self.run), settings.events_mb)
        self.rollouts = RolloutLog(path / ROLLOUTS, settings.rollouts_mb, updates, version)

    @classmethod
    def create(
        cls,
        path: Path,
        roles: Sequence[str] = ("trainer",),
        *,
        settings: ObserveConfig = _DEFAULT,
        updates: int = 1,
    ) -> RunFolder:
        """Make a new run folder. A folder that is not empty is refused, so that records never mix. `roles` are the training
        roles, in the order of the line; `updates` is the number of updates that the job will make."""
        refuse_used(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            return cls(path, RunLock(path), roles, settings, updates)
        except OSError as error:
            raise InputError(f"--run {path}: cannot be made: {error.strerror}") from None

    @classmethod
    def reopen(
        cls,
        path: Path,
        lock: RunLock,
        version: int,
        roles: Sequence[str],
        *,
        last_run: int = -1,
        settings: ObserveConfig = _DEFAULT,
        updates: int = 1,
    ) -> RunFolder:
        """Continue from the snapshot of `version`. Rows of later updates are removed, since those updates are repeated.
        `last_run` is the last start in the ledger; event logs may have been deleted."""
        _keep_rows(path / EVALUATIONS, lambda row: row.get("version", version + 1) <= version)
        shutil.rmtree(path / BATCHES, ignore_errors=True)  # its batches are worked on again
        for name in (TIMINGS, SPANS):
            cut_rows(path / name, lambda row: True)  # removes an incomplete last line
        return cls(path, lock, roles, settings, updates, version, last_run)

    def batch(self, update: int) -> Path:
        """Folder of the files that roles leave for one another until this update counts."""
        return self.path / BATCHES / str(update)

    def drop_batch(self, update: int) -> None:
        shutil.rmtree(self.batch(update), ignore_errors=True)

    def write_config(self, text: str) -> None:
        replace_file(self.path / CONFIG, text.encode())

    def write_summary(self, summary: Any) -> None:
        encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        replace_file(self.path / SUMMARY, encoded + b"\n")

    def sync(self) -> None:
        """Write the ledger to disk, after checking that this job still owns the folder."""
        self.lock.check()
        self.events.flush()
        self.ledger.sync()

    def log(self, name: str, text: str) -> Path:
        """Append to the log of an executor or another part; returns its path."""
        path = log_file(self.path, name)
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")
        return path

    def close(self) -> None:
        """Close all files, even if writing to one fails, and release the folder."""
        with ExitStack() as stack:
            stack.callback(self.lock.release)
            stack.callback(shutil.rmtree, self.path / BATCHES, ignore_errors=True)
            for file in (
                self.spans,
                self.timings,
                self.evaluations,
                self.metrics,
                self.rollouts,
                self.events,
                self.ledger,
            ):
                stack.callback(file.close)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash it has either the new content or the old."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _keep_rows(path: Path, keep: Callable[[Row], bool]) -> None:
    kept = [msgspec.json.encode(row) + b"\n" for row in read_rows(path) if keep(row)]
    replace_file(path, b"".join(kept))


def dated_run_folder(base: Path = Path("runs")) -> Path:
    """A new folder name from the current time."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    candidates = (base / (stamp + (f"_{number}" if number else "")) for number in range(1000))
    return next(path for path in candidates if not path.exists())
