"""A bound on how much a computation may do, counted in function calls: the same for every machine and every run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

# Less than a second each. Of the answers of MATH, half take 50,000 and 3,000 calls, the most 600,000 and 300,000.
MAX_READING_CALLS = 800_000
MAX_COMPARING_CALLS = 1_000_000


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

    sys.setprofile(count)
    try:
        return compute()
    except TooMuchWork:
        return otherwise
    finally:
        sys.setprofile(None)
