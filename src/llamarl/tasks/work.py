"""A bound on how much a computation may do, counted in function calls: the same for every machine and every run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MAX_CALLS = 1_000_000  # about a second; what is compared in earnest takes a few thousand


class TooMuchWork(BaseException):
    """Not an Exception: no library's `except Exception` may swallow it."""


def within_bounds(compute: Callable[[], bool], max_calls: int = MAX_CALLS) -> bool:
    """What `compute` returns, or False where it would take more than so many calls."""
    left = max_calls

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooMuchWork

    sys.setprofile(count)
    try:
        return compute()
    except TooMuchWork:
        return False
    finally:
        sys.setprofile(None)
