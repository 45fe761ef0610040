"""A bound on how much a computation may do, counted in function calls: the same for every machine and every run.

Libraries swallow exceptions, those of the bound included, and Python stops counting once its counter has raised. So a
timer of processor time follows, which raises again and again until it gets through.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

# Less than a second each. Of the answers of MATH, half take 50,000 and 3,000 calls, the most 600,000 and 300,000.
MAX_READING_CALLS = 800_000
MAX_COMPARING_CALLS = 1_000_000
_MAX_CPU_S = 2.5
_AGAIN_S = 0.05

Result = TypeVar("Result")


class TooMuchWork(BaseException):
    """Not an Exception: no library's `except Exception` may swallow it."""


def within_bounds(compute: Callable[[], Result], max_calls: int, otherwise: Result) -> Result:
    """What `compute` returns, or the other where it would take more than so many calls."""
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
    """Raises TooMuchWork after so many seconds of processor time, as often as it takes. Only the main thread hears signals;
    in others there is no such limit."""
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
