"""A run folder as data: settings, state, metrics, evaluations, rollouts, timeline, audit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from time import time
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from llamarl.config import Config
from llamarl.config.file import parse_config, read_config
from llamarl.controller.ledger import FINISHED, read_ledger
from llamarl.controller.ledger_state import Audit, audit
from llamarl.errors import InputError
from llamarl.observe.rows import Row, last_row, read_rows
from llamarl.observe.run_folder import CONFIG, EVALUATIONS, LEDGER, METRICS, SUMMARY, TIMELINE, TIMINGS
from llamarl.observe.run_lock import is_locked
from llamarl.observe.starts import STARTS, StartRecord, Starts
from llamarl.observe.summary import INTERRUPTED, STOPPED, Summary
from llamarl.runs.rollouts import RolloutReader

RunState = Literal["running", "finished", "stopped", "failed", "crashed"]
Table = dict[str, NDArray[np.float64]]


class EvaluationPoint(Struct, frozen=True):
    """The mean score of one version of the policy on held-out problems."""

    version: int
    accuracy: float


class TimelineSpan(Struct, frozen=True):
    """A stretch of time of one executor, in seconds since the start of the job."""

    executor: str
    kind: str  # work, weights, save or wait
    name: str
    start_s: float
    end_s: float


class Run:
    """Reads a run folder, while its job runs or afterwards. Every call reads what is there now; nothing is ever written.

    run = llamarl.Run("runs/mine")
    print(run.state, run.updates, "of", run.config.schedule.updates)
    plot(run.metrics()["update"], run.metrics()["reward"])
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not is_run(self.folder):
            raise InputError(f"{self.folder}: holds no run (no {CONFIG} there)")

    @property
    def config(self) -> Config:
        """The settings of the last start of the job."""
        start = self.last_start
        return parse_config(start.config) if start else read_config(self.folder / CONFIG)

    @property
    def last_start(self) -> StartRecord | None:
        """The last start of the job: when, from which version, with which settings and files."""
        return Starts(self.folder).last()

    @property
    def state(self) -> RunState:
        """What the job is doing, or how it ended. "stopped": on request; "failed": it said why in `summary.outcome`;
        "crashed": it ended without a word, as when it is killed. All but "finished" can be resumed."""
        if is_locked(self.folder):
            return "running"
        summary = self.summary
        if summary is None:
            return "crashed"
        if summary.outcome == FINISHED:
            return "finished"
        return "stopped" if summary.outcome in (STOPPED, INTERRUPTED) else "failed"

    @property
    def summary(self) -> Summary | None:
        """Totals and outcome of the last start; None while it runs, or if it ended without one."""
        try:
            summary = msgspec.json.decode((self.folder / SUMMARY).read_bytes(), type=Summary)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        start = self.last_start
        earlier = start is not None and summary.started_at < datetime.fromisoformat(start.at).timestamp()
        return None if earlier else summary

    @property
    def updates(self) -> int:
        """Number of updates made so far."""
        row = last_row(self.folder / METRICS)
        return int(row.get("update", -1)) + 1 if row else 0

    @property
    def wall_s(self) -> float:
        """Seconds that the last start of the job took, or has taken so far."""
        summary, start = self.summary, self.last_start
        if summary is not None:
            return summary.wall_s
        if start is None:
            return 0.0
        began = datetime.fromisoformat(start.at).timestamp()
        if self.state == "running":
            return time() - began
        row = last_row(self.folder / TIMINGS)
        return float(row.get("at_s", 0.0)) if row else 0.0

    def metrics(self, role: str | None = None) -> Table:
        """Metrics of every update as arrays of equal length, by name, among them "update"; NaN where an update lacks one.
        `role`: of this role instead of the last one that trains."""
        rows = read_rows(self.folder / METRICS)
        wanted = role or (rows[-1].get("role") if rows else None)
        return _table([row for row in rows if row.get("role") == wanted])

    def timings(self) -> Table:
        """Wall times of every update as arrays of equal length, by name, among them "update"."""
        return _table([row for row in read_rows(self.folder / TIMINGS) if "update" in row])

    def evaluations(self) -> list[EvaluationPoint]:
        """Scores on held-out problems, in the order of versions."""
        rows = [row for row in read_rows(self.folder / EVALUATIONS) if row.keys() >= {"version", "accuracy"}]
        found = {row["version"]: EvaluationPoint(row["version"], row["accuracy"]) for row in rows}
        return [found[version] for version in sorted(found)]

    @cached_property
    def rollouts(self) -> RolloutReader:
        """The rollouts that stay readable. Kept from call to call, since it holds an index; call its `refresh` on a run that
        goes on."""
        return RolloutReader(self.folder, self.config)

    def timeline(self) -> list[TimelineSpan]:
        """What each executor did and when; empty while the job runs, since it is written at the end."""
        try:
            rows = msgspec.json.decode((self.folder / TIMELINE).read_bytes(), type=_Trace).traceEvents
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return []
        names = {row.tid: row.args.get("name", "") for row in rows if row.ph == "M"}
        return [
            TimelineSpan(names.get(row.tid, ""), row.cat, row.name, row.ts / 1e6, (row.ts + row.dur) / 1e6)
            for row in rows
            if row.ph == "X"
        ]

    def audit(self) -> Audit:
        """What became of every group, from the ledger alone."""
        return audit(read_ledger(self.folder / LEDGER))


class _TraceRow(Struct, frozen=True):
    ph: str
    tid: int
    name: str
    args: Mapping[str, str] = {}
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(Struct, frozen=True):
    traceEvents: list[_TraceRow]


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / CONFIG).is_file() and ((folder / STARTS).is_file() or (folder / LEDGER).is_dir())


def _table(rows: list[Row]) -> Table:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _is_number(value))
    return {
        name: np.array([row[name] if _is_number(row.get(name)) else np.nan for row in rows], dtype=np.float64)
        for name in names
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
