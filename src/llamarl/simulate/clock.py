"""Virtual time: workers on devices, shared or their own, and the next worker with an event.

A device that several roles use at the same time gives each an equal share: two processes on one GPU take turns, unless they
compute side by side. The cores of a CPU are shared by threads.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from llamarl.controller import events as ev
from llamarl.controller.line import role_of
from llamarl.observe.timeline import Span, SpanKind, Timeline
from llamarl.plan.gpus import BesideFactors
from llamarl.simulate.workers import SimulatedExecutor

Speeds = tuple[float, float]
"""Of generators, and of all other roles; 1: as with the device to itself."""

_GENERATOR = "generator"
_KINDS: dict[str, SpanKind] = {"load": "weights", "publish": "weights", "save": "save"}


@dataclass(eq=False)
class Device:
    """A device that some workers share. `cores` 0: a set of GPUs, on which all replicas of a role work side by side. With
    `beside`, generators and another role do so too, the other one on its share of the multiprocessors."""

    cores: int = 0
    beside: BesideFactors | None = None
    trainer_share: float = 1.0
    seats: list[Seat] = field(default_factory=list)
    speeds: Speeds = (1.0, 1.0)
    busy: Counter[str] = field(default_factory=Counter)  # number of threads at work, by role

    def speeds_now(self) -> Speeds:
        if self.cores:
            return (min(1.0, self.cores / max(1, self.busy.total())),) * 2
        roles = sum(threads > 0 for threads in self.busy.values())
        if self.beside is None:
            return (1.0 / max(1, roles),) * 2
        if not self.busy[_GENERATOR]:
            return 1.0, self.beside.trainer_alone(self.trainer_share) / max(1, roles)
        beside = self.beside.with_trainer_share(self.trainer_share)
        return beside.generator if roles > 1 else 1.0, beside.trainer / max(1, roles - 1)


@dataclass(eq=False)
class Seat:
    """A worker on its device, and its current activity."""

    worker: SimulatedExecutor
    device: Device
    role: str
    threads: int = 1
    at_s: float = 0.0  # the time up to which its work is counted
    doing: str = ""
    since_s: float = 0.0  # start of the current activity
    turn: int = 0  # a forecast of an earlier turn does not count any more

    @property
    def speed(self) -> float:
        return self.device.speeds[self.role != _GENERATOR]


class Clock:
    def __init__(self, timeline: Timeline) -> None:
        self.now_s = 0.0
        self._timeline = timeline
        self._due: list[tuple[float, int, Seat | None, int, Callable[[], None] | None]] = []
        self._number = count()
        self.seats: dict[str, Seat] = {}
        self._events: list[ev.AnyEvent] = []  # events that `next` has not returned yet

    def seat(self, worker: SimulatedExecutor, device: Device, threads: int = 1) -> None:
        seat = Seat(worker, device, role_of(worker.name), threads)
        device.seats.append(seat)
        self.seats[worker.name] = seat

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._number), None, 0, action))

    def send(self, executor: str, command: ev.ExecutorCommand) -> Seat:
        """Call `look` once all commands of this moment are sent."""
        seat = self.seats[executor]
        self._settle(seat)
        seat.worker.handle(command)
        return seat

    def die(self, executor: str) -> None:
        """The executor loses everything it had."""
        seat = self.seats[executor]
        self._settle(seat)
        seat.worker.reset()
        self.look([seat])

    def look(self, seats: Sequence[Seat]) -> None:
        """Something has changed for these seats: forecast their next event anew."""
        for seat in dict.fromkeys(seats):
            if seat.worker.doing != seat.doing:
                self._note(seat)
                if (speeds := seat.device.speeds_now()) != seat.device.speeds:
                    self._change_speeds(seat.device, speeds)
            self._forecast(seat)

    def next(self) -> list[ev.AnyEvent] | None:
        """Advance time and return the next events; None: nothing will ever happen."""
        if self._events:
            return self._take_events()
        while self._due:
            at_s, _, seat, turn, action = heapq.heappop(self._due)
            if action is not None:
                self.now_s = at_s
                action()
                return self._take_events()
            if seat is not None and turn == seat.turn:
                self.now_s = max(self.now_s, at_s)
                self._settle(seat)
                self.look([seat])
                return self._take_events()
        return None

    def _take_events(self) -> list[ev.AnyEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End all activities here, for the timeline."""
        for seat in self.seats.values():
            self._note(seat)

    def _settle(self, seat: Seat) -> None:
        """Count the work up to now. Events that are due at this moment come next."""
        worked_s, seat.at_s = (self.now_s - seat.at_s) * seat.speed, self.now_s
        if seat.doing:
            self._events += seat.worker.advance(worked_s)

    def _change_speeds(self, device: Device, speeds: Speeds) -> None:
        for seat in device.seats:
            self._settle(seat)
        device.speeds = speeds
        for seat in device.seats:
            self._forecast(seat)

    def _forecast(self, seat: Seat) -> None:
        seat.turn += 1
        due_s = seat.worker.due_s()
        if due_s < float("inf"):
            at_s = self.now_s + due_s / seat.speed
            heapq.heappush(self._due, (at_s, next(self._number), seat, seat.turn, None))

    def _note(self, seat: Seat) -> None:
        if seat.doing and self.now_s > seat.since_s:
            kind = _KINDS.get(seat.doing, "work")
            self._timeline.add(seat.worker.name, [Span(kind, seat.doing, seat.since_s, self.now_s)])
        seat.device.busy[seat.role] += seat.threads * (bool(seat.worker.doing) - bool(seat.doing))
        seat.doing, seat.since_s = seat.worker.doing, self.now_s
