"""Runs one executor, in any process, and notes how its time was spent and what memory it took."""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec.structs import replace

from llamarl.engine.envelope import Envelope
from llamarl.engine.memory_watch import MemoryWatch
from llamarl.executors.executor import Executor
from llamarl.failpoints import failpoint
from llamarl.messages import (
    LoadWeights,
    Message,
    PublishWeights,
    Report,
    SaveState,
    StateNotSaved,
    StateSaved,
    WeightsLoaded,
    WeightsPublished,
)
from llamarl.observe.timeline import Span, SpanKind

_MERGE_GAP_S = 0.002  # slices closer than this become one span


class Runner:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._spans: list[Span] = []
        self._slices: SpanKind = "work"  # kind of the slices between messages; "save" while a snapshot is being written
        self._memory = MemoryWatch()

    @property
    def idle(self) -> bool:
        return self._executor.idle

    def handle(self, message: Message) -> list[Report]:
        failpoint("executor.take")
        start_s = time.monotonic()
        reports = list(self._executor.handle(message))
        failpoint("executor.answer")
        self._note(_kind(message), type(message).__name__, start_s)
        if isinstance(message, LoadWeights | PublishWeights):
            reports = [_with_time(report, time.monotonic() - start_s) for report in reports]
        if isinstance(message, SaveState):
            self._slices = "save"
        return reports

    def work(self) -> list[Report]:
        failpoint("executor.work")
        start_s, name = time.monotonic(), getattr(self._executor, "preparing", "") or "slice"
        reports = list(self._executor.work())
        self._note(self._slices, name, start_s)
        if any(isinstance(report, StateSaved | StateNotSaved) for report in reports):
            self._slices = "work"
        return reports

    def note_start(self, start_s: float) -> None:
        """Note that the executor was built since then: its model loaded, its memory laid out."""
        self._note("work", "start", start_s)

    def envelope(self, reports: Iterable[Report] = ()) -> Envelope:
        """These reports, with what was noted since the last envelope."""
        spans, self._spans = tuple(self._spans), []
        return Envelope(tuple(reports), spans, self._memory.take())

    def _note(self, kind: SpanKind, name: str, start_s: float) -> None:
        end_s = time.monotonic()
        last = self._spans[-1] if self._spans else None
        if last and last.kind == kind != "weights" and last.name == name and start_s - last.end_s < _MERGE_GAP_S:
            self._spans[-1] = Span(kind, name, last.start_s, end_s)
        else:
            self._spans.append(Span(kind, name, start_s, end_s))


def _with_time(report: Report, lost_s: float) -> Report:
    if isinstance(report, WeightsLoaded | WeightsPublished):
        return replace(report, lost_s=lost_s)
    return report


def _kind(message: Message) -> SpanKind:
    if isinstance(message, LoadWeights | PublishWeights):
        return "weights"
    return "save" if isinstance(message, SaveState) else "work"
