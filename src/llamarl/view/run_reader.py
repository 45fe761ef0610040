"""Follows one run folder: settings, metrics, timings, marks and state, as its files grow. Reads, and never writes."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from llamarl.config import Config
from llamarl.config.file import parse_config, read_config
from llamarl.errors import InputError, LlamaRLError
from llamarl.observe.rows import read_rows
from llamarl.observe.run_folder import (
    CONFIG,
    EVALUATIONS,
    LEDGER,
    METRICS,
    SNAPSHOTS,
    SPANS,
    SUMMARY,
    TIMELINE,
    TIMINGS,
)
from llamarl.observe.run_lock import LOCK, Owner
from llamarl.observe.starts import STARTS
from llamarl.observe.summary import Summary
from llamarl.view.series import Columns, Floats
from llamarl.view.spans import SpanReader, SpanStore
from llamarl.view.tails import LineTail

_REFRESH_S = 0.5  # files are looked at no more often than this
_SILENT_S = 120.0  # a run of another host that wrote nothing for so long is taken for ended


class Mark(Struct, frozen=True, omit_defaults=True):
    """Something that happened at a moment of the run."""

    kind: str  # start, death, restart, join, leave, snapshot, evaluation or setting
    text: str
    update: int  # number of updates made before it
    start: int = 0  # number of the job's start
    at_s: float = 0.0  # seconds since that start
    executor: str = ""


class RunReader:
    """One run folder, read as far as it is written. `refresh` looks for news; everything else is from memory."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise InputError(f"{path}: no such run folder")
        if not ((path / STARTS).exists() or (path / METRICS).exists() or (path / LEDGER).is_dir()):
            inside = sorted(child.name for child in path.iterdir() if (child / METRICS).exists())
            hint = f"; it holds runs: name one, such as {path / inside[-1]}" if inside else ""
            raise InputError(f"{path}: holds no run{hint}")
        self.path, self.name = path, path.resolve().name
        self.lock = threading.RLock()
        self.metrics, self.timings = Columns(), Columns()
        self.starts_s: dict[int, float] = {}  # number of each start -> seconds of all starts before it
        self.starts: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.last_start = 0
        self._started_at = 0.0  # Unix time of the last start; 0: not recorded
        self._marks: list[Mark] = []
        self._last_at_s = 0.0
        self._metrics_tail, self._timings_tail = LineTail(path / METRICS), LineTail(path / TIMINGS)
        self._spans = SpanReader(path / SPANS, path / TIMELINE)
        self._next_s = 0.0
        self.config, self.config_error = self._read_config()

    def refresh(self) -> None:
        """Read what is new, at most twice a second."""
        with self.lock:
            if time.monotonic() < self._next_s:
                return
            self._read_metrics()
            self._read_timings()
            self.starts = read_rows(self.path / STARTS)
            self.evaluations = [row for row in read_rows(self.path / EVALUATIONS) if "version" in row]
            self._next_s = time.monotonic() + _REFRESH_S

    @property
    def num_updates(self) -> int:
        return self.metrics.num_updates

    @property
    def stamp(self) -> str:
        """Changes whenever there is something new to show."""
        return f"{self.num_updates}.{len(self.evaluations)}.{len(self._marks)}.{len(self.starts)}.{self.state[0]}"

    # Settings

    def _read_config(self) -> tuple[Config, str]:
        """The settings of the last start. If they cannot be read, the defaults, and the reason."""
        try:
            if (self.path / CONFIG).is_file():
                return read_config(self.path / CONFIG), ""
            rows = read_rows(self.path / STARTS)
            return (parse_config(rows[-1]["config"]), "") if rows else (Config(), "the run folder has no config.yaml")
        except (LlamaRLError, KeyError) as error:
            return Config(), f"its settings cannot be read: {error}"

    # Files

    def _read_metrics(self) -> None:
        last = "trainer"
        for _, row in self._metrics_tail.read():
            if self._metrics_tail.was_reset:
                self.metrics.clear()
                self._metrics_tail.was_reset = False
            update, role = row.pop("update", None), row.pop("role", last)
            if isinstance(update, int) and update >= 0:
                self.metrics.add(update, row, "" if role == last else f"{role}.")

    def _read_timings(self) -> None:
        for _, row in self._timings_tail.read():
            if self._timings_tail.was_reset:
                self.timings.clear()
                self.starts_s, self._marks, self.last_start, self._last_at_s = {}, [], 0, 0.0
                self._timings_tail.was_reset = False
            self._take_timing(row)

    def _take_timing(self, row: dict[str, Any]) -> None:
        at_s = float(row.get("at_s", 0.0))
        if "start" in row:
            self._begin(int(row["start"]), float(row.get("unix_s", 0.0)))
        elif at_s < self._last_at_s - 1.0:  # written before starts had a row of their own
            self._begin(self.last_start + 1, 0.0)
        self._last_at_s = max(self._last_at_s, at_s)
        if isinstance(update := row.pop("update", None), int):
            self.timings.add(update, {**row, "start": self.last_start})
        else:
            self._mark(row, at_s)

    def _begin(self, start: int, unix_s: float) -> None:
        before = self.starts_s.get(self.last_start, 0.0) + self._last_at_s
        self.last_start, self._last_at_s, self._started_at = start, 0.0, unix_s
        self.starts_s[start] = before
        if start:
            self._marks.append(Mark("start", f"start {start + 1} of the job", self.timings.num_updates, start))

    def _mark(self, row: dict[str, Any], at_s: float) -> None:
        executor, host = str(row.get("executor", "")), row.get("host", "")
        kind, text = "", ""
        if "died" in row:
            kind, text = "death", f"{executor} died: {row['died']}"
        elif "restarted" in row:
            kind, text = "restart", f"{executor} was started again"
        elif "joined" in row:
            kind, text = "join", f"{executor} joined, on {host}"
        elif "left" in row:
            kind, text = "leave", f"{executor} left, on {host}: {row['left']}"
        elif "snapshot" in row:
            kind, text = "snapshot", f"snapshot of version {row['snapshot']}"
        if kind:
            update = int(row["snapshot"]) if kind == "snapshot" else self.timings.num_updates
            self._marks.append(Mark(kind, text, update, self.last_start, at_s, executor))

    @property
    def marks(self) -> list[Mark]:
        """Everything that is marked on plots, in order of updates."""
        found = list(self._marks)
        if not any(mark.kind == "snapshot" for mark in found):
            found += [Mark("snapshot", f"snapshot of version {n}", n) for n in self._snapshots()]
        found += [
            Mark("evaluation", f"version {row['version']} evaluated: {row.get('accuracy', 0.0):.3f}", row["version"])
            for row in self.evaluations
        ]
        return sorted([*found, *self._changed_settings()], key=lambda mark: mark.update)

    def _snapshots(self) -> list[int]:
        folder = self.path / SNAPSHOTS
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []

    def _changed_settings(self) -> list[Mark]:
        found = []
        for before, after in zip(self.starts, self.starts[1:], strict=False):
            was, now = flat(before.get("config", {})), flat(after.get("config", {}))
            changed = [f"{name}: {was.get(name)} -> {now[name]}" for name in now if was.get(name) != now[name]]
            if changed:
                found.append(
                    Mark("setting", "; ".join(changed), int(after.get("version", 0)), int(after.get("run", 0)))
                )
        return found

    # Time

    @property
    def elapsed_s(self) -> Floats:
        """Seconds of running time until the end of each update, over all starts; the time between starts is left out."""
        at_s, start = self.timings.get("at_s"), self.timings.get("start")
        before = np.zeros(len(start))
        for number, seconds in self.starts_s.items():
            before[start == number] = seconds
        return fitted(at_s + before, self.num_updates)

    def spans(self) -> dict[int, SpanStore]:
        """The spans of each start, as far as they are recorded."""
        with self.lock:
            self._spans.refresh(self.last_start)
            return self._spans.by_start

    @property
    def span_roles(self) -> list[str]:
        """Roles whose waiting is recorded."""
        with self.lock:
            return self._spans.roles(self.last_start)

    @property
    def spans_full(self) -> bool:
        return self._spans.full

    # State

    @property
    def summary(self) -> Summary | None:
        """The totals of the last start; None while it runs, and if it was killed."""
        try:
            found = msgspec.json.decode((self.path / SUMMARY).read_bytes(), type=Summary)
        except (OSError, msgspec.MsgspecError):
            return None
        return found if not self._started_at or found.started_at >= self._started_at - 1.0 else None

    @property
    def state(self) -> tuple[str, str]:
        """(live, finished, stopped or killed; the same in words)."""
        summary = self.summary
        if summary is not None:
            ended = "finished" if summary.outcome == "finished" else "stopped"
            return ended, summary.outcome
        owner = self._owner()
        if owner is not None and owner.host == socket.gethostname():
            if Path(f"/proc/{owner.pid}").exists():
                return "live", "running"
            return "killed", "its process is gone and left no summary: it was killed, or the machine went down"
        if time.time() - self._last_written() < _SILENT_S:
            return "live", "running, as its files are being written"
        return "killed", "no summary and no news: it was killed, or copied while it ran"

    def _owner(self) -> Owner | None:
        try:
            return msgspec.json.decode((self.path / LOCK).read_bytes(), type=Owner)
        except (OSError, msgspec.MsgspecError):
            return None

    def _last_written(self) -> float:
        times = []
        for name in (METRICS, TIMINGS, SPANS, STARTS):
            try:
                times.append(os.stat(self.path / name).st_mtime)
            except OSError:
                continue
        return max(times, default=0.0)


def fitted(values: Floats, count: int) -> Floats:
    """The first `count` values; NaN where there are fewer."""
    if len(values) >= count:
        return values[:count]
    return np.concatenate([values, np.full(count - len(values), np.nan)])


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    if not isinstance(settings, dict) or (prefix and not settings):
        return {prefix: settings}
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found
