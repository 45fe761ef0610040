"""Kills and stops ranks of a running job, each a moment after its executor was told to do something."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from helpers.engines import engine_class
from llamarl.engine.engine import Arrival, Death, EngineEvent
from llamarl.engine.supervision import Supervision
from llamarl.messages import GroupResult, Message, WeightsLoaded

IDLE = "idle"


@dataclass
class Deed:
    """One signal to one rank, or to all of an executor, a moment after it was told to do something, or has nothing to do."""

    executor: str
    state: type[Message] | str
    number: signal.Signals
    delay_s: float
    rank: int | None = 0  # None: all ranks
    done_s: float | None = None
    incarnation: int = -1
    in_state: bool = False
    noticed_s: float | None = None
    recovered_s: float | None = None
    reason: str = ""  # of the death, as the engine told it

    def __str__(self) -> str:
        state = self.state if isinstance(self.state, str) else self.state.__name__
        times = " and ".join("never" if t is None else f"{t:.1f} s" for t in (self.noticed_s, self.recovered_s))
        who = f"{self.executor} {'all ranks' if self.rank is None else f'rank {self.rank}'}"
        return f"{self.number.name} {who} at {state}: dead and back after {times}: {self.reason}"


@dataclass
class Killer:
    """Does one deed after the other: the next once the victim of the last works again. A state that does not come about
    within `patience_s` is not waited for."""

    deeds: Sequence[Deed]
    patience_s: float
    at: int = 0
    armed_s: float = field(default_factory=time.monotonic)
    timers: list[threading.Timer] = field(default_factory=list)

    @property
    def deed(self) -> Deed | None:
        return self.deeds[self.at] if self.at < len(self.deeds) else None

    def saw(self, engine: Supervision[Any], executor: str, state: type[Message] | str) -> None:
        deed = self.deed
        if deed is None or deed.done_s is not None or deed.executor != executor:
            return
        if not all(rank.up for rank in engine._ranks_of(executor)):
            return
        in_state = deed.state == state
        if in_state or time.monotonic() - self.armed_s > self.patience_s:
            ranks = [rank for rank in engine._ranks_of(executor) if deed.rank in (None, rank.rank)]
            deed.done_s, deed.incarnation, deed.in_state = time.monotonic(), ranks[0].incarnation, in_state
            timer = threading.Timer(deed.delay_s, self._strike, ([rank.pid for rank in ranks], deed))
            self.timers.append(timer)
            timer.start()

    def heard(self, arrival: EngineEvent) -> None:
        deed = self.deed
        if deed is None or deed.done_s is None or arrival.executor != deed.executor:
            return
        since_s = time.monotonic() - deed.done_s
        if isinstance(arrival, Death):
            if arrival.incarnation == deed.incarnation:
                deed.noticed_s, deed.reason = since_s, arrival.reason
        elif isinstance(arrival, Arrival) and arrival.incarnation > deed.incarnation and arrival.report is not None:
            # A generator is back when it has weights or an answer; any other role when it is up.
            if deed.executor.startswith("generator") and not isinstance(arrival.report, WeightsLoaded | GroupResult):
                return
            deed.recovered_s = since_s
            self.at, self.armed_s = self.at + 1, time.monotonic()

    def _strike(self, pids: Sequence[int], deed: Deed) -> None:
        deed.done_s = time.monotonic()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, deed.number)


def disturbed(killer: Killer) -> type[Any]:
    """The engine class under test, with a killer who sees and hears all that it does."""

    class DisturbedEngine(engine_class()):  # type: ignore[misc]
        def send(self, executor: str, message: Message) -> None:
            super().send(executor, message)
            if (executor, 0) in self._ranks:
                killer.saw(self, executor, type(message))

        def events(self) -> Sequence[EngineEvent]:
            arrivals: Sequence[EngineEvent] = super().events()
            for arrival in arrivals:
                killer.heard(arrival)
            for rank in list(self._ranks.values()):
                if not rank.owes and rank.rank == 0:
                    killer.saw(self, rank.executor, IDLE)
            return arrivals

    return DisturbedEngine
