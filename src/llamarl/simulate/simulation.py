"""Drives the real controller through virtual time, and counts update times, waiting, staleness and faults."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

from msgspec import Struct

from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.ledger import Issued, Record, Replaced
from llamarl.errors import JobFailed
from llamarl.observe.timeline import Timeline
from llamarl.simulate.answers import Answers
from llamarl.simulate.clock import Clock, Seat

DETECT_S = 1.0  # seconds until a death is noticed


class Faults(Struct, frozen=True):
    """Every GPU fails once in `mtbf_s` on average, and its executor dies with it; a restart takes `restart_s`."""

    mtbf_s: float = 0.0
    restart_s: float = 120.0
    seed: int = 0


NO_FAULTS = Faults()


class SimulationResult(Struct, frozen=True, kw_only=True):
    """The result of a rehearsal. Times are virtual, except `controller_s`."""

    updates: int
    update_s: float  # mean time of an update, once the line is full
    wall_s: float
    idle_share: dict[str, float]
    staleness: dict[int, float]  # staleness -> share of the trained groups
    deaths: int
    redone_updates: int
    events: int
    controller_s: float  # real time that this machine spent in the controller
    groups: int
    replaced: int = 0  # groups without variance whose place in a batch another took


class Simulation:
    """The workers are seated on the clock already. `hear` gets every ledger record, for checks."""

    def __init__(
        self,
        controller: Controller,
        clock: Clock,
        timeline: Timeline,
        answers: Answers,
        *,
        ranks: Mapping[str, int],
        start_s: float = 0.0,
        background: Callable[[ev.AnyCommand], float] = lambda command: 0.0,
        faults: Faults = NO_FAULTS,
        hear: Callable[[Record], None] = lambda record: None,
        max_s: float = float("inf"),
    ) -> None:
        self.controller, self.clock, self.timeline = controller, clock, timeline
        self.answers = answers
        self._ranks, self._start_s, self._background, self._faults = ranks, start_s, background, faults
        self._hear, self._max_s = hear, max_s
        self._chance = Random(faults.seed)
        self._ended = False
        self._issued: dict[int, int] = {}  # ordinal -> version that its executor held when it was handed out
        self._staleness: Counter[int] = Counter()
        self._replaced = 0
        self._trained_s: dict[int, float] = {}
        self._dead: set[str] = set()
        self._deaths = self._redone = self._events = 0
        self._controller_s = 0.0

    def run(self) -> SimulationResult:
        self._tell([ev.Began()])
        for executor in self._ranks:
            self._expect_death(executor)
        while not self._ended and self.clock.now_s < self._max_s:
            events = self.clock.next()
            if events is None:
                raise JobFailed("the simulated job stands still: nobody has anything to do")
            self._tell(events)
        self.clock.close()
        return self._outcome()

    def _tell(self, events: list[ev.AnyEvent]) -> None:
        touched: list[Seat] = []
        for event in events:
            self._note(event)
            started_s = time.process_time()
            commands = self.controller.handle(event)
            self._controller_s += time.process_time() - started_s
            self._events += 1
            for command in commands:
                self._obey(command, touched)
        self.clock.look(touched)

    def _note(self, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.BatchDone):
            self._redone += event.update in self._trained_s
            self._trained_s[event.update] = self.clock.now_s

    def _obey(self, command: ev.AnyCommand, touched: list[Seat]) -> None:
        match command:
            case ev.Start():
                delay_s = self._faults.restart_s if command.incarnation else self._start_s
                started = ev.Started(command.executor, command.incarnation)
                self.clock.later(delay_s, lambda: self._start(started))
            case ev.ExecutorCommand() if command.executor in self._dead:
                pass
            case ev.ExecutorCommand():
                if isinstance(command, ev.RunBatch):
                    self._count_staleness(command)
                if isinstance(command, ev.Save):
                    saved = ev.Saved(command.executor, command.incarnation, command.version)
                    self.clock.later(self._background(command), lambda: self._tell([saved]))
                touched.append(self.clock.send(command.executor, command))
            case ev.Commit():
                committed = ev.Committed(command.version)
                self.clock.later(0.0, lambda: self._tell([committed]))
            case ev.Write():
                self._record(command.record)
            case ev.Finish():
                self._ended = True
            case ev.Abort():
                raise JobFailed(f"the simulated job stopped: {command.reason}")
            case _:
                pass

    def _start(self, started: ev.Started) -> None:
        self._dead.discard(started.executor)
        self._tell([started])

    def _record(self, record: Record) -> None:
        self._hear(record)
        if isinstance(record, Issued):
            self._issued[record.ordinal] = record.version
        elif isinstance(record, Replaced):
            self._replaced += 1
            self._issued.pop(record.ordinal, None)

    def _count_staleness(self, command: ev.RunBatch) -> None:
        for ordinal in command.ordinals:
            if ordinal in self._issued:
                self._staleness[command.update - self._issued.pop(ordinal)] += 1

    # Faults

    def _expect_death(self, executor: str) -> None:
        if self._faults.mtbf_s:
            delay_s = self._chance.expovariate(self._ranks[executor] / self._faults.mtbf_s)
            self.clock.later(delay_s, lambda: self._die(executor))

    def _die(self, executor: str) -> None:
        state = self.controller.executors[executor]
        if state.up and not self._ended:
            self._deaths += 1
            self._dead.add(executor)
            self.clock.die(executor)
            died = ev.Died(executor, state.incarnation, "a simulated fault")
            self.clock.later(DETECT_S, lambda: self._tell([died]))
        self._expect_death(executor)

    # The result

    def _outcome(self) -> SimulationResult:
        times = [self._trained_s[update] for update in sorted(self._trained_s)]
        first = min(len(times) - 1, max(1, len(times) // 10)) if len(times) > 1 else 0
        start_s, end_s = times[first] if times else 0.0, times[-1] if times else 0.0
        counted = sum(self._staleness.values())
        return SimulationResult(
            updates=len(times),
            update_s=(end_s - start_s) / max(1, len(times) - 1 - first),
            wall_s=self.clock.now_s,
            idle_share=self.timeline.idle_share(start_s, end_s),
            staleness={age: number / counted for age, number in sorted(self._staleness.items())},
            deaths=self._deaths,
            redone_updates=self._redone,
            events=self._events,
            controller_s=self._controller_s,
            groups=counted,
            replaced=self._replaced,
        )
