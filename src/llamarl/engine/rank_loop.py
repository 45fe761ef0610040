"""The life of one executor rank, in whatever process an engine gave it: build, say so, then answer messages and work in
slices between them. The last word of one that fails is why."""

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
_QUICK_S = 0.001  # for a group: whoever takes longer has said what it did before it takes the next


class Connection(Protocol):
    """This rank's end of its connection to the engine."""

    last_sent_s: float

    def next(self, *, wait: bool) -> Message | None:
        """The next message; None when there is none and nobody wants to wait."""

    def send(self, envelope: Envelope) -> None:
        """May be called by several threads."""


class ConnectionClosed(Exception):
    """The engine hung up."""


def tell(line: Connection, report: Report) -> None:
    line.send(Envelope((report,), ()))


def run_rank(build: Callable[[], Executor], line: Connection, ranks: Ranks) -> None:
    runner = Runner(build())
    if ranks.rank == 0:
        _serve(runner, line, ranks)
    else:
        _follow(runner, line, ranks)


def tell_failure(line: Connection, error: BaseException) -> None:
    """The border to the executor's code: what happened there becomes one report, and a traceback in its log."""
    traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, OwnCodeFailed | ConfigError):
        tell(line, MustStop(str(error)))  # started anew, it would fail again
        return
    tell(line, Failed(" ".join(f"{type(error).__name__}: {error}".split())))


def _serve(runner: Runner, line: Connection, ranks: Ranks) -> None:
    """Rank 0: the only one the engine talks to. It tells the others what to do, and it alone reports. What is said of groups
    that were quickly done waits for the next group, if that has already come: an envelope costs as much as a small group."""
    tell(line, Up())
    held: list[Report] = []
    quick = False
    while True:
        message = line.next(wait=runner.idle and not held)
        if held and not (quick and isinstance(message, WorkOnGroup)):
            line.send(Envelope(tuple(held), runner.take_spans()))
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
                line.send(Envelope(tuple(held), runner.take_spans()))  # what was done before is done
            raise
        quick = isinstance(message, WorkOnGroup) and time.monotonic() - began_s < _QUICK_S
        if not held and time.monotonic() - line.last_sent_s > _SIGN_OF_LIFE_S:
            line.send(Envelope((), runner.take_spans()))


def _follow(runner: Runner, line: Connection, ranks: Ranks) -> None:
    """Any other rank: does what rank 0 says, when it says so."""
    tell(line, Up())
    while not isinstance(message := ranks.listen(), Stop):
        if message is not None:
            runner.handle(message)
        else:
            runner.work()
        runner.take_spans()
