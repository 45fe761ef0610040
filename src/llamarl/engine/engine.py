"""What every engine offers: spawn, send, events, stop. Executors do not know which engine runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from llamarl.machine import MemoryPeak
from llamarl.messages import Message, Report
from llamarl.observe.timeline import Span


class Arrival(Struct, frozen=True):
    """A report of an executor, and what it has done since the last one."""

    executor: str
    incarnation: int
    report: Report | None  # None: only what a rank has done and held
    spans: tuple[Span, ...] = ()
    rank: int = 0  # whose spans and memory they are; reports come from the first rank
    memory: MemoryPeak | None = None


class Death(Struct, frozen=True):
    """The end of an executor that was not asked to stop."""

    executor: str
    incarnation: int
    reason: str


class ExecutorJoined(Struct, frozen=True):
    """A host that came while the job runs has room for this executor."""

    executor: str
    host: str


class ExecutorLeft(Struct, frozen=True):
    """The executor's host, which had joined, is gone; nothing of the executor lives there any more."""

    executor: str
    host: str
    reason: str


EngineEvent = Arrival | Death | ExecutorJoined | ExecutorLeft


class Engine(Protocol):
    def spawn(self, executor: str, incarnation: int, snapshot: Path | None) -> None:
        """Start an executor, from a snapshot if there is one; `Up` arrives when it is ready."""

    def send(self, executor: str, message: Message) -> None:
        """Deliver messages in order. Those to a dead executor are dropped: its death arrives as an event."""

    def events(self) -> Sequence[EngineEvent]:
        """Everything that happened since the last call; waits a little if nothing did."""

    def dismiss(self, executor: str, reason: str) -> None:
        """End an executor that had joined, for good; its host is told the reason, and `ExecutorLeft` arrives."""

    def stop(self) -> None:
        """End every executor and leave nothing behind. A second call is a no-op."""
