"""What a person sees while a job runs."""

from __future__ import annotations

import time
from typing import Protocol

from msgspec import Struct
from rich.console import Console

_SECONDS_BETWEEN_LINES = 5.0


class Snapshot(Struct, frozen=True):
    """The state of a job after an update."""

    update: int
    updates: int
    metrics: dict[str, float]
    tokens_generated: int
    tokens_trained: int
    elapsed_s: float

    @property
    def left_s(self) -> float:
        return self.elapsed_s / self.update * (self.updates - self.update)


class Display(Protocol):
    def update(self, snapshot: Snapshot) -> None: ...

    def note(self, text: str) -> None: ...

    def tick(self) -> None: ...


class Quiet:
    def update(self, snapshot: Snapshot) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass


class Lines:
    """Plain lines, at most one every few seconds, and always the first and the last update."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = 0.0

    def update(self, snapshot: Snapshot) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _SECONDS_BETWEEN_LINES and 1 < snapshot.update < snapshot.updates:
            return
        self._last_s = now_s
        self._console.print(line_of(snapshot), highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def tick(self) -> None:
        pass


def line_of(snapshot: Snapshot) -> str:
    metrics = snapshot.metrics
    rate = 1 / max(1e-9, snapshot.elapsed_s)
    return (
        f"update {snapshot.update:>4} of {snapshot.updates}   reward {metrics.get('reward', 0.0):.3f}   "
        f"staleness {metrics.get('staleness_mean', 0.0):.2f}   "
        f"generated {snapshot.tokens_generated * rate:,.0f} tok/s   "
        f"trained {snapshot.tokens_trained * rate:,.0f} tok/s   "
        f"{format_seconds(snapshot.left_s)} left"
    )


def format_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02} min"
