"""What engines with processes share: who is up, who owes an answer, who has been silent for too long, who died and why."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llamarl.config import Config
from llamarl.engine.engine import Arrival, Death
from llamarl.engine.envelope import Envelope
from llamarl.engine.out_of_memory import explain_death
from llamarl.machine import KilledForMemory
from llamarl.messages import Failed, MustStop, ReaderStuck, Up

_SOON_S = 3.0  # a death so soon after the start makes the next start wait
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0


@dataclass(eq=False)
class Rank:
    """The engine's end of one executor rank."""

    executor: str
    incarnation: int
    rank: int
    born_s: float = field(default_factory=time.monotonic)  # or, if later, when there was somebody to bear it
    up: bool = False
    owes: int = 0  # messages it has not answered
    waiting_since_s: float = 0.0  # when it last spoke, or was given work that found it without any
    hung_up_s: float | None = None
    reason: str = ""
    pid: int = 0

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.executor, self.incarnation, self.rank


class Backoff:
    """Who dies soon after it was started waits before the next start, longer each time; who lived a while does not."""

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._delay_s: dict[str, float] = {}

    def delay_s(self, executor: str) -> float:
        """Called at every start; how long to wait with it."""
        now_s, before_s = time.monotonic(), self._started_s.get(executor)
        soon = before_s is not None and now_s - before_s < _SOON_S
        delay_s = min(_MAX_BACKOFF_S, max(_MIN_BACKOFF_S, 2 * self._delay_s.get(executor, 0.0))) if soon else 0.0
        self._delay_s[executor], self._started_s[executor] = delay_s, now_s + delay_s
        return delay_s


AnyRank = TypeVar("AnyRank", bound=Rank)


class Supervision(ABC, Generic[AnyRank]):
    obituary_s = 0.5  # how long a hang-up waits for somebody to say why

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ranks: dict[tuple[str, int], AnyRank] = {}
        self._arrivals: list[Arrival | Death] = []
        self._backoff = Backoff()
        self._killed_for_memory = KilledForMemory()

    # What each engine does in its own way

    @abstractmethod
    def _cut(self, state: AnyRank) -> None:
        """End the connection to it."""

    @abstractmethod
    def _kill(self, state: AnyRank) -> None:
        """End its process, however little it cooperates."""

    def _fault(self, state: AnyRank, now_s: float) -> str:
        """Why it must go, beyond what `_check_deadlines` finds; empty: it need not."""
        return ""

    # What it says

    def _owe(self, state: AnyRank) -> None:
        """It was given one more message."""
        if not state.owes:
            state.waiting_since_s = time.monotonic()
        state.owes += 1

    def _hear_envelope(self, state: AnyRank, envelope: Envelope) -> None:
        state.waiting_since_s = time.monotonic()
        if envelope.spans and state.rank == 0:  # first: who hears of an update wants to know how its time was spent
            self._arrivals.append(Arrival(state.executor, state.incarnation, None, envelope.spans))
        for report in envelope.reports:
            match report:
                case Failed():
                    self._end(state, report.reason)
                    return
                case ReaderStuck():
                    self._kill_reader(report.pid)
                case Up():
                    self._hear_up(state)
                case MustStop():  # of any rank: the job ends
                    self._arrivals.append(Arrival(state.executor, state.incarnation, report))
                case _ if state.rank == 0:
                    state.owes = max(0, state.owes - 1)
                    self._arrivals.append(Arrival(state.executor, state.incarnation, report))

    def _hear_up(self, state: AnyRank) -> None:
        """An executor is up when all its ranks are."""
        was_up, state.up = state.up, True
        if not was_up and all(one.up for one in self._ranks_of(state.executor)):
            self._arrivals.append(Arrival(state.executor, state.incarnation, Up()))

    def _take_arrivals(self) -> list[Arrival | Death]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    # Deaths

    def _ranks_of(self, executor: str) -> list[AnyRank]:
        return [state for state in self._ranks.values() if state.executor == executor]

    def _hang_up(self, state: AnyRank, reason: str = "") -> None:
        """End this connection, not the job. Without a reason of ours, whoever bore it is given time to say why it ended."""
        if state.hung_up_s is not None:
            return
        state.hung_up_s = time.monotonic()
        state.reason = state.reason or reason
        self._cut(state)

    def _end(self, state: AnyRank, reason: str) -> None:
        """Its process must go too, for a reason of ours."""
        self._hang_up(state, reason)
        self._kill(state)

    def _hear_of_death(self, state: AnyRank, reason: str) -> None:
        if state.reason and len(self._ranks_of(state.executor)) > 1:
            return  # its complaint may only be about the rank that died first: that one is given time to be told of
        self._bury(state, state.reason or reason)

    def _bury(self, state: AnyRank, reason: str) -> None:
        """The death of any rank is the death of the executor."""
        for one in self._ranks_of(state.executor):
            self._end(one, "")
            del self._ranks[one.executor, one.rank]
        where = f"rank {state.rank}: " if state.rank else ""
        told = explain_death(state.executor, reason, killed_for_memory=self._killed_for_memory.again())
        self._arrivals.append(Death(state.executor, state.incarnation, where + told))

    def _check_deadlines(self, *, starting: bool = True) -> None:
        """`starting`: there is somebody to bear executors, so that they can be expected to come up."""
        now_s, limits = time.monotonic(), self._config.engine
        for state in list(self._ranks.values()):
            if state.hung_up_s is not None:
                if now_s - state.hung_up_s > self.obituary_s and self._ranks.get((state.executor, state.rank)) is state:
                    self._bury(state, state.reason or "hung up")
            elif not state.up and starting and now_s - state.born_s > limits.start_s:
                self._end(state, f"did not start within {limits.start_s:g} s")
            elif state.owes and now_s - state.waiting_since_s > limits.silence_s:
                self._end(state, f"silent for {limits.silence_s:g} s with work to do")
            elif fault := self._fault(state, now_s):
                self._end(state, fault)

    def _kill_reader(self, pid: int) -> None:
        for state in list(self._ranks.values()):
            if state.pid == pid != 0:
                self._end(state, f"kept a weight slot for over {self._config.weights.lease_s:g} s")
