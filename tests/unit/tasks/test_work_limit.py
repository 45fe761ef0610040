"""A computation that would take too much is ended, also where it swallows what ends it."""

from __future__ import annotations

import signal
import time

from llamarl.tasks.math.work_limit import within_bounds


def endless(swallow: int) -> str:
    while True:
        try:
            while True:
                len(str(1))
        except:  # noqa: E722, what some libraries do
            if not swallow:
                raise
            swallow -= 1


def test_what_is_within_its_bound_is_returned_and_nothing_stays_set() -> None:
    before = signal.getsignal(signal.SIGPROF)
    assert within_bounds(lambda: "done", 1000, otherwise="late") == "done"
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_what_is_beyond_it_is_not_finished() -> None:
    started_s = time.process_time()
    assert within_bounds(lambda: endless(0), 10_000, otherwise="late") == "late"
    assert time.process_time() - started_s < 1


def test_who_swallows_the_end_is_ended_again_and_again() -> None:
    """The counter raises once, and Python then stops counting: that once was left to the time-out from outside."""
    started_s = time.process_time()
    assert within_bounds(lambda: endless(5), 10_000, otherwise="late") == "late"
    assert time.process_time() - started_s < 8
