"""Failures of scorers and tools. They are counted apart from wrong answers; too many of them end the job."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from msgspec import Struct

_NUM_RECENT = 1000  # number of recent attempts in the share of failures
_MAX_KINDS = 20  # limit of reported kinds, since a broken scorer may fail differently on every answer
_MIN_ATTEMPTS = 100  # fewest attempts for a share, so that a failure at the start does not end the job


def to_stderr(text: str) -> None:
    """Write to stderr, which is the log of an executor that has its own process."""
    print(text, file=sys.stderr, flush=True)


class Counts(Struct):
    """Number of failed attempts since the counts were last taken."""

    failures: int = 0
    timeouts: int = 0

    def add(self, status: str) -> None:
        self.failures += status == "error"
        self.timeouts += status == "timeout"

    def __bool__(self) -> bool:
        return bool(self.failures or self.timeouts)


class FailureLog:
    """Reports each kind of failure once, with its traceback, through `write`."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._seen: set[str] = set()
        self.last = ""

    def note(self, reason: str, trace: str) -> bool:
        """Record a failure. Returns whether its kind is new: its place in the code or, without one, its message."""
        self.last = reason
        kind = "\n".join(line for line in trace.splitlines() if line.startswith("  File ")) or reason
        if kind in self._seen or len(self._seen) >= _MAX_KINDS:
            return False
        self._seen.add(kind)
        self._write(f"{reason}\n{trace}".rstrip())
        return True


class FailureShare:
    """The share of failures among the last thousand attempts."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._failed: deque[bool] = deque(maxlen=_NUM_RECENT)

    def note(self, *, failed: bool) -> None:
        self._failed.append(failed)

    @property
    def excess(self) -> tuple[int, int] | None:
        """Return (failures, attempts) if the share is above the limit, else None."""
        failed = sum(self._failed)
        too_many = failed > self._max_share * max(len(self._failed), _MIN_ATTEMPTS)
        return (failed, len(self._failed)) if too_many else None
