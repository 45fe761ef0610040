"""The loop of one executor rank, in any process: build the executor, report `Up`, then answer messages, and work in slices
between them. A rank that fails reports why."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from llamarl.engine.envelope import Envelope
from llamarl.engine.ranks import Ranks
from llamarl.engine.runner import Runner
from llamarl.errors import ConfigError, OwnCodeFailed
from llamarl.executors.executor import Executor
from llamarl.messages import Failed, Message, MustStop, Report, Stop, Up, WorkOnGroup

_SIGN_OF_LIFE_S = 1.0
_QUICK_S = 0.001  # a group that takes longer is reported before the next one is handled


class Connection(Protocol):
    """This rank's end of its connection to the engine."""

    last_sent_s: float

    def next(self, *, wait: bool) -> Message | None:
        """The next message; None if there is none and `wait` is false."""

    def send(self, envelope: Envelope) -> None:
        """Send an envelope. Several threads may call this."""


class ConnectionClosed(Exception):
    """The engine hung up."""


def tell(connection: Connection, report: Report) -> None:
    connection.send(Envelope((report,), ()))


def run_rank(build: Callable[[], Executor], connection: Connection, ranks: Ranks) -> None:
    start_s = time.monotonic()
    runner = Runner(build())
    runner.note_start(start_s)
    if ranks.rank == 0:
        _serve(runner, connection, ranks)
    else:
        _follow(runner, connection, ranks)


def tell_failure(connection: Connection, error: BaseException) -> None:
    """Turn an exception of the executor's code into one report, with the traceback in its log."""
    traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, OwnCodeFailed | ConfigError):
        tell(connection, MustStop(str(error)))  # after a restart, it would fail again
        return
    tell(connection, Failed(" ".join(f"{type(error).__name__}: {error}".split())))


def _serve(runner: Runner, connection: Connection, ranks: Ranks) -> None:
    """Rank 0: the only rank the engine talks to. It tells the others what to do, and it alone reports. Reports of groups that
    were done quickly wait for the next group, if that is here already: an envelope costs as much as a small group."""
    tell(connection, Up())
    held: list[Report] = []
    quick = False
    while True:
        message = connection.next(wait=runner.idle and not held)
        if held and not (quick and isinstance(message, WorkOnGroup)):
            connection.send(runner.envelope(held))
            held = []
            if message is None and runner.idle:
                continue
        ranks.tell(message)
        if isinstance(message, Stop):
            return
        began_s = time.monotonic()
        try:
            held += runner.handle(message) if message is not None else runner.work()
        except (Exception, SystemExit):
            if held:
                connection.send(runner.envelope(held))  # what was done before the failure still counts
            raise
        quick = isinstance(message, WorkOnGroup) and time.monotonic() - began_s < _QUICK_S
        if not held and time.monotonic() - connection.last_sent_s > _SIGN_OF_LIFE_S:
            connection.send(runner.envelope())


def _follow(runner: Runner, connection: Connection, ranks: Ranks) -> None:
    """Any other rank: do what rank 0 says, when it says so. It reports nothing but how it spends its time."""
    tell(connection, Up())
    while not isinstance(message := ranks.listen(), Stop):
        if message is not None:
            runner.handle(message)
        else:
            runner.work()
        if time.monotonic() - connection.last_sent_s > _SIGN_OF_LIFE_S:
            connection.send(runner.envelope())
