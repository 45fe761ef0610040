"""What SIGTERM and Ctrl-C mean while a job runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llamarl.engine.driver import Driver
from llamarl.observe.summary import INTERRUPTED


@contextmanager
def signals_stop(driver: Driver, *, in_this_process: bool) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C ask for a snapshot and a clean end; the second Ctrl-C ends the job at once. Only the main
    thread may set handlers; in other threads, nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler if in_this_process else interrupt)
        driver.request_stop(INTERRUPTED)

    def interrupt(number: int, frame: object) -> None:
        """Left to the driver's loop: an exception raised here may fall into a destructor and be lost."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        driver.interrupt()

    handlers: dict[int, Callable[[int, object], None]] = {signal.SIGTERM: lambda number, frame: driver.request_stop()}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = stop
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
