"""Spans of work by executor, packed into arrays: what each executor did at any time, and the share of it that it waited."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamarl.observe.timeline import lane_order
from llamarl.view.series import Floats
from llamarl.view.tails import LineTail

KINDS = ("work", "weights", "save")
MAX_DRAWN = 1500  # spans of one lane that are sent one by one; more become shares of bins
Shown = tuple[str, str, float, float]  # kind, name, start, end


class Lane:
    """The spans of one executor."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, str], int] = {}
        self._label_of, self._times_s = array("L"), array("d")
        self._in_order: tuple[Floats, Floats, NDArray[np.uint64]] | None = None

    def __len__(self) -> int:
        return len(self._label_of)

    def extend(self, spans: Iterable[Any]) -> None:
        """Add spans: kind, name, start and end of each."""
        labels, label, time = self._labels, self._label_of.append, self._times_s.append
        for kind, name, start_s, end_s in spans:
            label(labels.setdefault((kind, name), len(labels)))
            time(start_s)
            time(end_s)
        self._in_order = None

    def busy_until(self, times_s: Floats, kind: str = "") -> Floats:
        """Seconds of work, of this kind if one is named, before each of the times."""
        starts, ends, labels = self._sorted()
        if kind:
            chosen = np.isin(labels, [number for (of, _), number in self._labels.items() if of == kind])
            starts, ends = starts[chosen], ends[chosen]
        if not len(starts):
            return np.zeros(len(times_s))
        total = np.concatenate([[0.0], np.cumsum(ends - starts)])
        last = np.searchsorted(starts, times_s, side="right")  # spans that have begun
        over = np.maximum(0.0, ends[np.maximum(0, last - 1)] - times_s) * (last > 0)
        return np.asarray(total[last] - over)

    def between(self, start_s: float, end_s: float) -> list[Shown]:
        """The spans that overlap with [start, end], in order."""
        starts, ends, labels = self._sorted()
        found = np.flatnonzero((ends > start_s) & (starts < end_s))
        named = list(self._labels)
        return [(*named[labels[n]], round(float(starts[n]), 4), round(float(ends[n]), 4)) for n in found.tolist()]

    def count_between(self, start_s: float, end_s: float) -> int:
        starts, ends, _ = self._sorted()
        return int(np.count_nonzero((ends > start_s) & (starts < end_s)))

    @property
    def end_s(self) -> float:
        return max(self._times_s[1::2], default=0.0)

    def _sorted(self) -> tuple[Floats, Floats, NDArray[np.uint64]]:
        """Starts, ends and labels, ordered by start."""
        if self._in_order is None:
            times, labels = np.array(self._times_s, dtype=np.float64), np.array(self._label_of, dtype=np.uint64)
            starts, ends = times[::2], times[1::2]
            order = np.argsort(starts, kind="stable")
            self._in_order = starts[order], ends[order], labels[order]
        return self._in_order


class SpanStore:
    """The lanes of one start of a job, one for each rank of each executor."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}

    def add(self, executor: str, spans: Iterable[Any]) -> None:
        self.lanes.setdefault(executor, Lane()).extend(spans)

    @property
    def end_s(self) -> float:
        return max((lane.end_s for lane in self.lanes.values()), default=0.0)

    def drawn(self, start_s: float, end_s: float, bins: int) -> list[dict[str, Any]]:
        """Each lane in this window: its spans, or, where these are too many, the share of each bin by kind."""
        lanes = sorted(self.lanes.items(), key=lambda item: lane_order(item[0]))
        return [{"executor": name, **_drawn(lane, start_s, end_s, bins)} for name, lane in lanes]

    def waiting(self, edges_s: Floats) -> dict[str, Floats]:
        """Maps each role to the mean share that its executors' first ranks waited between one time and the next."""
        found: dict[str, list[Floats]] = {}
        length = np.maximum(1e-9, np.diff(edges_s))
        for executor, lane in self.lanes.items():
            if lane_order(executor)[1]:
                continue
            busy = np.diff(lane.busy_until(edges_s))
            found.setdefault(executor.partition("/")[0], []).append(np.clip(1 - busy / length, 0.0, 1.0))
        return {role: np.mean(shares, axis=0) for role, shares in found.items()}


def _drawn(lane: Lane, start_s: float, end_s: float, bins: int) -> dict[str, Any]:
    edges = np.linspace(start_s, end_s, bins + 1)
    length = max(1e-9, (end_s - start_s) / bins)
    window = np.array([start_s, end_s])
    busy = float(np.diff(lane.busy_until(window))[0]) / max(1e-9, end_s - start_s)
    if lane.count_between(start_s, end_s) <= MAX_DRAWN:
        return {"busy": round(busy, 4), "spans": lane.between(start_s, end_s)}
    shares = {kind: np.diff(lane.busy_until(edges, kind)) / length for kind in KINDS}
    return {"busy": round(busy, 4), "shares": {kind: np.round(part, 3).tolist() for kind, part in shares.items()}}


class SpanReader:
    """Follows spans.jsonl; of a run that has none, reads timeline.json, which covers its last start only."""

    def __init__(self, rows: Path, trace: Path) -> None:
        self._rows, self._tail, self._trace = rows, LineTail(rows), trace
        self.by_start: dict[int, SpanStore] = {}
        self.full = False  # whether the file reached its size limit, so that later spans are missing
        self.from_trace = False

    def roles(self, last_start: int) -> list[str]:
        """Roles that have spans; found without reading all of them, if possible."""
        first = next((row for _, row in LineTail(self._rows).read() if row.get("spans")), None)
        if first is None:
            self.refresh(last_start)
        executors = {str(name) for name in (first or {}).get("spans", ())}
        executors |= {name for store in self.by_start.values() for name in store.lanes}
        return sorted({name.partition("/")[0] for name in executors})

    def refresh(self, last_start: int) -> None:
        for _, row in self._tail.read():
            if self._tail.was_reset:
                self.by_start, self._tail.was_reset = {}, False
            self.full = self.full or bool(row.get("full"))
            store = self.by_start.setdefault(int(row.get("start", 0)), SpanStore())
            for executor, spans in dict(row.get("spans") or {}).items():
                store.add(str(executor), spans)
        if not self.by_start and not self.from_trace and self._trace.is_file():
            self.from_trace = True
            self.by_start = {last_start: _of_trace(self._trace)}


class _TraceRow(msgspec.Struct):
    ph: str
    tid: int
    name: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: Mapping[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_TraceRow]  # the name in Chrome's format


def _of_trace(path: Path) -> SpanStore:
    """The spans of a timeline.json; none if it cannot be read."""
    store, names = SpanStore(), dict[int, str]()
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=_Trace).traceEvents
    except (OSError, msgspec.MsgspecError):
        return store
    for row in rows:
        if row.ph == "M":
            names[row.tid] = str(row.args.get("name", row.tid))
        elif row.cat in KINDS:
            store.add(names.get(row.tid, str(row.tid)), [(row.cat, row.name, row.ts / 1e6, (row.ts + row.dur) / 1e6)])
    return store
