"""What engines with processes share: which ranks are up, owe an answer, or have been silent too long; which died, and why."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llamarl.config import Config
from llamarl.engine.engine import Arrival, Death, EngineEvent
from llamarl.engine.envelope import Envelope
from llamarl.engine.out_of_memory import explain_death
from llamarl.machine import KilledForMemory
from llamarl.messages import Failed, MustStop, ReaderStuck, Up

_SOON_S = 3.0  # a death so soon after the start makes the next start wait
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0


@dataclass(eq=False)
class Rank:
    """The engine's view of one executor rank."""

    executor: str
    incarnation: int
    rank: int
    started_s: float = field(default_factory=time.monotonic)  # or, if later, when the fork server was ready
    up: bool = False
    owes: int = 0  # number of messages it has not answered
    waiting_since_s: float = 0.0  # when it last reported, or was given work while it had none
    hung_up_s: float | None = None  # when its connection ended
    reason: str = ""  # why it must go, if we decided so
    pid: int = 0

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.executor, self.incarnation, self.rank


class Backoff:
    """How long a restart waits: longer each time an executor dies soon after its start, and not at all otherwise."""

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._delay_s: dict[str, float] = {}

    def delay_s(self, executor: str) -> float:
        """How long this start must wait. Call it once for each start."""
        now_s, before_s = time.monotonic(), self._started_s.get(executor)
        soon = before_s is not None and now_s - before_s < _SOON_S
        delay_s = min(_MAX_BACKOFF_S, max(_MIN_BACKOFF_S, 2 * self._delay_s.get(executor, 0.0))) if soon else 0.0
        self._delay_s[executor], self._started_s[executor] = delay_s, now_s + delay_s
        return delay_s


AnyRank = TypeVar("AnyRank", bound=Rank)


class Supervision(ABC, Generic[AnyRank]):
    """Base of engines whose ranks are processes: keeps deadlines, and turns faults and ends into `Death`."""

    exit_report_s = 0.5  # how long a hang-up waits for the exit status of the process

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ranks: dict[tuple[str, int], AnyRank] = {}
        self._arrivals: list[EngineEvent] = []
        self._backoff = Backoff()
        self._killed_for_memory = KilledForMemory()

    # What each engine does in its own way

    @abstractmethod
    def _cut(self, state: AnyRank) -> None:
        """Close the connection to the rank."""

    @abstractmethod
    def _kill(self, state: AnyRank) -> None:
        """End its process by force."""

    def _fault(self, state: AnyRank, now_s: float) -> str:
        """Why the rank must go, beyond what `_check_deadlines` finds; empty: no fault."""
        return ""

    def dismiss(self, executor: str, reason: str) -> None:
        """Executors join only engines that say so."""
        raise AssertionError(f"{executor} cannot have joined: {reason}")

    # What it says

    def _owe(self, state: AnyRank) -> None:
        """Note that the rank was given one more message."""
        if not state.owes:
            state.waiting_since_s = time.monotonic()
        state.owes += 1

    def _hear_envelope(self, state: AnyRank, envelope: Envelope) -> None:
        state.waiting_since_s = time.monotonic()
        if envelope.spans or envelope.memory:  # before the reports, which are explained by them
            done = (envelope.spans, state.rank, envelope.memory)
            self._arrivals.append(Arrival(state.executor, state.incarnation, None, *done))
        for report in envelope.reports:
            match report:
                case Failed():
                    self._end(state, report.reason)
                    return
                case ReaderStuck():
                    self._kill_reader(report.pid)
                case Up():
                    self._hear_up(state)
                case MustStop():  # from any rank, it ends the job
                    self._arrivals.append(Arrival(state.executor, state.incarnation, report))
                case _ if state.rank == 0:
                    state.owes = max(0, state.owes - 1)
                    self._arrivals.append(Arrival(state.executor, state.incarnation, report))

    def _hear_up(self, state: AnyRank) -> None:
        """An executor is up when all its ranks are."""
        was_up, state.up = state.up, True
        if not was_up and all(one.up for one in self._ranks_of(state.executor)):
            self._arrivals.append(Arrival(state.executor, state.incarnation, Up()))

    def _take_arrivals(self) -> list[EngineEvent]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    # Deaths

    def _ranks_of(self, executor: str) -> list[AnyRank]:
        return [state for state in self._ranks.values() if state.executor == executor]

    def _hang_up(self, state: AnyRank, reason: str = "") -> None:
        """End this connection, not the job. Without a reason of ours, the exit status of its process is waited for."""
        if state.hung_up_s is not None:
            return
        state.hung_up_s = time.monotonic()
        state.reason = state.reason or reason
        self._cut(state)

    def _end(self, state: AnyRank, reason: str) -> None:
        """End the connection and the process, for a reason of ours."""
        self._hang_up(state, reason)
        self._kill(state)

    def _hear_of_death(self, state: AnyRank, reason: str) -> None:
        if state.reason and len(self._ranks_of(state.executor)) > 1:
            return  # it may only complain about another rank that died first: wait until that death is heard of
        self._declare_dead(state, state.reason or reason)

    def _declare_dead(self, state: AnyRank, reason: str) -> None:
        """The death of any rank is the death of the executor."""
        self._remove(state.executor)
        where = f"rank {state.rank}: " if state.rank else ""
        told = explain_death(state.executor, reason, killed_for_memory=self._killed_for_memory.again())
        self._arrivals.append(Death(state.executor, state.incarnation, where + told))

    def _remove(self, executor: str) -> None:
        """End all ranks of the executor and forget them."""
        for one in self._ranks_of(executor):
            self._end(one, "")
            del self._ranks[one.executor, one.rank]

    def _check_deadlines(self, *, starting: bool = True) -> None:
        """End ranks that are late. `starting`: ranks can be expected to come up, since a fork server is ready."""
        now_s, limits = time.monotonic(), self._config.engine
        for state in list(self._ranks.values()):
            if state.hung_up_s is not None:
                if (
                    now_s - state.hung_up_s > self.exit_report_s
                    and self._ranks.get((state.executor, state.rank)) is state
                ):
                    self._declare_dead(state, state.reason or "hung up")
            elif not state.up and starting and now_s - state.started_s > limits.start_s:
                self._end(state, f"did not start within {limits.start_s:g} s")
            elif state.owes and now_s - state.waiting_since_s > limits.silence_s:
                self._end(state, f"silent for {limits.silence_s:g} s with work to do")
            elif fault := self._fault(state, now_s):
                self._end(state, fault)

    def _kill_reader(self, pid: int) -> None:
        for state in list(self._ranks.values()):
            if state.pid == pid != 0:
                self._end(state, f"kept a weight slot for over {self._config.weights.lease_s:g} s")
