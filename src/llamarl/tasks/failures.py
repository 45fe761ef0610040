"""Failures of scorers and tools: counted apart from answers, and too many of them end the job."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

_REMEMBERED = 1000  # over which the share of failures is taken
_LEAST = 100  # that a share is taken of, so that the first failure of a job is not all there is


class Counts(Struct):
    """Attempts that failed, since the last time somebody took them."""

    failures: int = 0
    timeouts: int = 0

    def add(self, status: str) -> None:
        self.failures += status == "error"
        self.timeouts += status == "timeout"

    def __bool__(self) -> bool:
        return bool(self.failures or self.timeouts)


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
