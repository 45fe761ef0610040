"""The timeline of a run: spans of work per executor, the share of time each waited, and a trace file for Perfetto."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from msgspec import Struct

SpanKind = Literal["work", "weights", "save"]


class Span(Struct, frozen=True, array_like=True):
    """A stretch of work of one executor; time not covered by any span is waiting.

    Times are seconds on the monotonic clock, which all processes of a host share."""

    kind: SpanKind
    name: str
    start_s: float
    end_s: float


MAX_SPANS = 200_000  # spans kept per executor: a few megabytes in memory, about twenty in the file


class Track:
    """The latest spans of one executor, packed. Only the total of older spans is kept, which bounds memory and file
    size."""

    def __init__(self) -> None:
        self._labels: dict[tuple[SpanKind, str], int] = {}
        self._label_of, self._times_s = array("H"), array("d")
        self.forgotten_s = 0.0  # total duration of the forgotten spans
        self.known_since_s = float("-inf")  # end of the last forgotten span

    def append(self, span: Span) -> None:
        self._label_of.append(self._labels.setdefault((span.kind, span.name), len(self._labels)))
        self._times_s.extend((span.start_s, span.end_s))
        if len(self) > MAX_SPANS:
            self._forget(MAX_SPANS // 2)

    def _forget(self, count: int) -> None:
        starts_s, ends_s = self._times_s[: 2 * count : 2], self._times_s[1 : 2 * count : 2]
        self.forgotten_s += sum(ends_s) - sum(starts_s)
        self.known_since_s = ends_s[-1]
        del self._label_of[:count], self._times_s[: 2 * count]

    def __len__(self) -> int:
        return len(self._label_of)

    def __getitem__(self, at: int) -> Span:
        kind, name = tuple(self._labels)[self._label_of[at]]
        return Span(kind, name, *self._times_s[2 * at : 2 * at + 2])

    def __iter__(self) -> Iterator[Span]:
        return (self[at] for at in range(len(self)))

    def __reversed__(self) -> Iterator[Span]:
        return (self[at] for at in range(len(self) - 1, -1, -1))


_RANK = " rank "


def lane_name(executor: str, rank: int) -> str:
    """Name of a rank's lane: the executor's for its first rank, such as `trainer/0`, and `trainer/0 rank 1` for the next."""
    return f"{executor}{_RANK}{rank}" if rank else executor


def lane_order(name: str) -> tuple[str, int]:
    """Key by which lanes are sorted: by executor, then by rank."""
    executor, _, rank = name.partition(_RANK)
    return executor, int(rank) if rank.isdecimal() else 0


class Timeline:
    """The spans of all executors. Those of an executor are its first rank's; other ranks are only drawn."""

    def __init__(self) -> None:
        self.spans: dict[str, Track] = {}
        self._others: dict[str, Track] = {}  # of the other ranks, by the name of their lane
        self._stays: dict[
            str, list[tuple[float, float]]
        ] = {}  # when executors that joined were there; others always are

    def joined(self, executor: str, at_s: float) -> None:
        self._stays.setdefault(executor, []).append((at_s, math.inf))

    def left(self, executor: str, at_s: float) -> None:
        since_s, _ = self._stays[executor][-1]
        self._stays[executor][-1] = (since_s, at_s)

    def _stays_of(self, executor: str, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """The parts of [start, end] in which the executor was there."""
        if executor not in self._stays:
            return [(start_s, end_s)]
        return [(max(start_s, a), min(end_s, b)) for a, b in self._stays[executor] if a < end_s and b > start_s]

    def add(self, executor: str, spans: Iterable[Span], rank: int = 0) -> None:
        track = (self._others if rank else self.spans).setdefault(lane_name(executor, rank), Track())
        for span in spans:
            track.append(span)

    def busy_s(self, executor: str, start_s: float, end_s: float) -> float:
        """Seconds of [start, end] in which the executor worked. Spans are ordered and do not overlap.

        If `start_s` is before the kept spans, all forgotten work counts, as if it were the start of the run."""
        track, busy = self.spans.get(executor, Track()), 0.0
        for span in reversed(track):
            if span.end_s <= start_s:
                break
            busy += max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
        return busy + (track.forgotten_s if start_s < track.known_since_s else 0.0)

    def waiting(self, start_s: float, end_s: float) -> dict[str, float]:
        """Maps each executor to the share of [start, end] that it waited; of the time that it was there, if it had joined."""
        found = {}
        for executor in self.spans:
            if stays := self._stays_of(executor, start_s, end_s):
                length = max(1e-9, sum(b - a for a, b in stays))
                found[executor] = max(0.0, 1.0 - self.busy_s(executor, start_s, end_s) / length)
        return found

    def idle_share(self, start_s: float, end_s: float) -> dict[str, float]:
        """Maps each role to the mean share of [start, end] that its executors waited."""
        shares: dict[str, list[float]] = {}
        for executor, share in self.waiting(start_s, end_s).items():
            shares.setdefault(executor.partition("/")[0], []).append(share)
        return {role: sum(found) / len(found) for role, found in shares.items()}

    def write(self, path: Path, start_s: float, end_s: float) -> None:
        """Write a file in Chrome's trace format, with one track per rank; waiting is drawn between the spans."""
        rows: list[dict[str, object]] = []
        lanes = {**self.spans, **self._others}
        for track, (lane, spans) in enumerate(sorted(lanes.items(), key=lambda item: lane_order(item[0]))):
            rows.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": lane}})
            for span in self._drawn(lane_order(lane)[0], sorted(spans, key=lambda span: span.start_s), start_s, end_s):
                rows.append(
                    {
                        "ph": "X",
                        "pid": 1,
                        "tid": track,
                        "cat": span[0],
                        "name": span[1],
                        "ts": round((span[2] - start_s) * 1e6, 1),
                        "dur": round((span[3] - span[2]) * 1e6, 1),
                    }
                )
        path.write_text(json.dumps({"traceEvents": rows}))

    def _drawn(
        self, executor: str, spans: list[Span], start_s: float, end_s: float
    ) -> Iterable[tuple[str, str, float, float]]:
        """The spans of one executor, with waiting between them while it was there."""
        if executor not in self._stays:
            return _with_waiting(spans, start_s, end_s)
        stays = self._stays_of(executor, start_s, end_s)
        return chain(*(_with_waiting([span for span in spans if a <= span.start_s < b], a, b) for a, b in stays))


def _with_waiting(spans: list[Span], start_s: float, end_s: float) -> Iterable[tuple[str, str, float, float]]:
    at = start_s
    for span in spans:
        if span.start_s > at:
            yield "wait", "wait", at, span.start_s
        yield span.kind, span.name, span.start_s, span.end_s
        at = max(at, span.end_s)
    if end_s > at:
        yield "wait", "wait", at, end_s
