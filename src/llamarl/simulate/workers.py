"""Simulated executors: what each does with a command, how long that takes, and which event follows.

A worker knows no clock. `advance` tells it how many seconds of its own work have passed, and `due_s` returns the seconds of
work until its next event: on a shared device, work passes more slowly than time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from llamarl.controller import events as ev
from llamarl.plan.gpus import EngineFactors
from llamarl.simulate.answers import Answers
from llamarl.simulate.decoding import Decoding
from llamarl.types import GroupFacts

_SOON_S = 1e-9  # work that needs less than this is done


class WorkItem(NamedTuple):
    """Work of a known length, and the event at its end."""

    left_s: float
    name: str
    event: ev.AnyEvent | None = None


class SimulatedExecutor(Protocol):
    name: str

    @property
    def doing(self) -> str:
        """The current activity in one word; empty: the worker waits."""

    def handle(self, command: ev.ExecutorCommand) -> None: ...

    def due_s(self) -> float:
        """Seconds of work until the next event; infinite: the worker waits."""

    def advance(self, worked_s: float) -> list[ev.AnyEvent]:
        """`worked_s` seconds of work are done, at most as many as were due. Returns the events that are due now."""

    def reset(self) -> None:
        """The executor died, and everything it had is lost."""


class WorkQueue:
    """Work items, done one after the other."""

    def __init__(self) -> None:
        self._items: deque[WorkItem] = deque()

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def first(self) -> WorkItem:
        return self._items[0]

    def add(self, item: WorkItem) -> None:
        self._items.append(item)

    def advance(self, worked_s: float) -> tuple[float, list[ev.AnyEvent]]:
        """Returns the seconds that were left over, and the events that are due."""
        events: list[ev.AnyEvent] = []
        while self._items:
            item = self._items[0]
            if item.left_s > worked_s + _SOON_S:
                self._items[0] = item._replace(left_s=item.left_s - worked_s)
                return 0.0, events
            self._items.popleft()
            worked_s = max(0.0, worked_s - item.left_s)
            if item.event is not None:
                events.append(item.event)
        return worked_s, events

    def clear(self) -> None:
        self._items.clear()


class QueueWorker:
    """A trainer or a reward. `plan` turns a command into work."""

    def __init__(self, name: str, plan: Callable[[ev.ExecutorCommand], WorkItem]) -> None:
        self.name, self._plan, self._queue = name, plan, WorkQueue()

    @property
    def doing(self) -> str:
        return self._queue.first.name if self._queue else ""

    def handle(self, command: ev.ExecutorCommand) -> None:
        self._queue.add(self._plan(command))

    def due_s(self) -> float:
        return self._queue.first.left_s if self._queue else inf

    def advance(self, worked_s: float) -> list[ev.AnyEvent]:
        return self._queue.advance(worked_s)[1]

    def reset(self) -> None:
        self._queue.clear()


class GeneratorWorker:
    """A replica of the generator: it prefills the prompts that have arrived, or loads weights, or else decodes."""

    def __init__(self, name: str, decoding: Decoding, answers: Answers, engine: EngineFactors, load_s: float) -> None:
        self.name, self._decoding, self._answers, self._engine = name, decoding, answers, engine
        self._load_s, self._version = load_s, -1
        self._arrived: list[ev.RunGroup] = []
        self._queue = WorkQueue()
        self._under_way: dict[int, tuple[int, int]] = {}  # ordinal -> incarnation, version of the first token

    @property
    def doing(self) -> str:
        if self._queue:
            return self._queue.first.name
        return "decode" if self._under_way or self._arrived else ""

    def handle(self, command: ev.ExecutorCommand) -> None:
        match command:
            case ev.RunGroup():
                self._arrived.append(command)
            case ev.Load():
                done = ev.Loaded(command.executor, command.incarnation, command.version)
                self._queue.add(WorkItem(self._load_s + self._engine.message_s, "load", done))
            case _:
                raise AssertionError(f"a generator is not told {command}")

    def due_s(self) -> float:
        self._begin()
        return self._queue.first.left_s if self._queue else self._decoding.due_s()

    def advance(self, worked_s: float) -> list[ev.AnyEvent]:
        self._begin()
        worked_s, events = self._queue.advance(worked_s)
        for event in events:
            if isinstance(event, ev.Loaded):
                self._version = event.version
        if not self._queue:
            events += [self._done(ordinal) for ordinal in self._decoding.advance(worked_s)]
        return events

    def reset(self) -> None:
        self._arrived.clear()
        self._queue.clear()
        self._under_way.clear()
        self._decoding.clear()
        self._version = -1

    def _begin(self) -> None:
        """Prompts that arrived at the same time are prefilled together; then their answers start."""
        if not self._arrived:
            return
        count = len(self._arrived)
        self._queue.add(WorkItem(self._decoding.replica.prefill_s(count) + count * self._engine.group_s, "prefill"))
        for command in self._arrived:
            lengths = self._answers.of(command.ordinal)
            self._decoding.start(command.ordinal, lengths[:1] if command.kind == "evaluation" else lengths)
            self._under_way[command.ordinal] = (command.incarnation, self._version)
        self._arrived.clear()

    def _done(self, ordinal: int) -> ev.GroupDone:
        incarnation, version = self._under_way.pop(ordinal)
        facts = GroupFacts(self._answers.tokens(ordinal), version, self._version)
        return ev.GroupDone(self.name, incarnation, ordinal, facts)
