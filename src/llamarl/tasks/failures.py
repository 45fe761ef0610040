"""Failures of scorers and tools: counted apart from answers, and too many of them end the job."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from msgspec import Struct

_REMEMBERED = 1000  # over which the share of failures is taken
_MOST_KINDS = 20  # of failures that are told; a broken scorer may find a new one for every answer
_LEAST = 100  # that a share is taken of, so that the first failure of a job is not all there is


def to_stderr(text: str) -> None:
    """Where an executor has a process of its own, that is its log."""
    print(text, file=sys.stderr, flush=True)


class Counts(Struct):
    """Attempts that failed, since the last time somebody took them."""

    failures: int = 0
    timeouts: int = 0

    def add(self, status: str) -> None:
        self.failures += status == "error"
        self.timeouts += status == "timeout"

    def __bool__(self) -> bool:
        return bool(self.failures or self.timeouts)


class FailureLog:
    """Tells each kind of failure once: with its traceback through `write`, and to whoever asks."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._seen: set[str] = set()
        self.last = ""

    def note(self, reason: str, trace: str) -> bool:
        """Whether it is new: its place in the code, or its words where it has none, has not been seen."""
        self.last = reason
        kind = "\n".join(line for line in trace.splitlines() if line.startswith("  File ")) or reason
        if kind in self._seen or len(self._seen) >= _MOST_KINDS:
            return False
        self._seen.add(kind)
        self._write(f"{reason}\n{trace}".rstrip())
        return True


class FailureShare:
    """What could not be done, of the last thousand things asked."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._failed: deque[bool] = deque(maxlen=_REMEMBERED)

    def note(self, *, failed: bool) -> None:
        self._failed.append(failed)

    @property
    def excess(self) -> tuple[int, int] | None:
        """(failed, of so many) when that is more than is allowed."""
        failed = sum(self._failed)
        too_many = failed > self._most * max(len(self._failed), _LEAST)
        return (failed, len(self._failed)) if too_many else None
