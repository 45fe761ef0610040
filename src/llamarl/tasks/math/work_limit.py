"""Limits the work of a computation by its number of function calls, which is the same on every machine and in every run.

Libraries may swallow the exception of the limit, and Python stops counting once the counter has raised. So there is also a
timer of processor time that raises repeatedly until it gets through.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

# Each takes less than a second. Answers of MATH take 50,000 and 3,000 calls in the median, at most 600,000 and 300,000.
MAX_READING_CALLS = 800_000
MAX_COMPARING_CALLS = 1_000_000
_MAX_CPU_S = 2.5
_AGAIN_S = 0.05

Result = TypeVar("Result")


class TooMuchWork(BaseException):
    """The limit was reached. A BaseException, so that no library's `except Exception` swallows it."""


def within_bounds(compute: Callable[[], Result], max_calls: int, otherwise: Result) -> Result:
    """Return compute(), or `otherwise` if it takes more than `max_calls` calls or too much processor time."""
    left = max_calls

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooMuchWork

    try:
        with _limited_cpu_s(_MAX_CPU_S):
            sys.setprofile(count)
            try:
                return compute()
            finally:
                sys.setprofile(None)
    except TooMuchWork:
        return otherwise


@contextmanager
def _limited_cpu_s(seconds: float) -> Iterator[None]:
    """Raise TooMuchWork after so many seconds of processor time, repeatedly. Signals reach only the main thread; other
    threads have no such limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = False

    def stop(number: int, frame: FrameType | None) -> None:
        if not over:
            raise TooMuchWork

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
