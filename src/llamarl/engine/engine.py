"""What every engine offers: spawn, send, events, stop. Executors do not know which one runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from llamarl.messages import Message, Report
from llamarl.observe.timeline import Span


class Arrival(Struct, frozen=True):
    """Something an executor said, and what it has been doing since it last spoke."""

    executor: str
    incarnation: int
    report: Report | None  # None: nothing but the spans
    spans: tuple[Span, ...] = ()


class Death(Struct, frozen=True):
    executor: str
    incarnation: int
    reason: str


class Engine(Protocol):
    def spawn(self, executor: str, incarnation: int, snapshot: Path | None) -> None:
        """Bring an executor up, from a snapshot if there is one; `Up` arrives when it is there."""

    def send(self, executor: str, message: Message) -> None:
        """Deliver in order; to one that is dead, silently not at all: its death arrives as an event."""

    def events(self) -> Sequence[Arrival | Death]:
        """What has happened since the last call; waits a little when nothing has."""

    def stop(self) -> None:
        """End every executor and leave nothing behind. May be called twice."""
