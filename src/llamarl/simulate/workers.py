"""Executors that only take time: what each does with a command, how long that takes, and what it says afterwards.

A worker knows no clock. It is told how many seconds of its own work have passed (`advance`), and says in how many it will
have something to report (`due_s`): on a device that is shared, work passes more slowly than time.
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

_SOON_S = 1e-9  # less than this before its end, a piece of work is done


class WorkItem(NamedTuple):
    """Work of a known length, and what is said at its end."""

    left_s: float
    name: str
    event: ev.AnyEvent | None = None


class SimulatedExecutor(Protocol):
    name: str

    @property
    def doing(self) -> str:
        """What it is busy with, in a word; empty when it waits."""

    def handle(self, command: ev.ExecutorCommand) -> None: ...

    def due_s(self) -> float:
        """Seconds of work until the next report; infinite when it waits."""

    def advance(self, worked_s: float) -> list[ev.AnyEvent]:
        """So much work is done, at most as much as was due; returns what is to be reported now."""

    def fall(self) -> None:
        """It died, and all it had is lost."""


class Pieces:
    """Work on one piece after the other."""

    def __init__(self) -> None:
        self._pieces: deque[WorkItem] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def first(self) -> WorkItem:
        return self._pieces[0]

    def add(self, piece: WorkItem) -> None:
        self._pieces.append(piece)

    def advance(self, worked_s: float) -> tuple[float, list[ev.AnyEvent]]:
        """Returns the work that was left over, and what is to be said."""
        said: list[ev.AnyEvent] = []
        while self._pieces:
            piece = self._pieces[0]
            if piece.left_s > worked_s + _SOON_S:
                self._pieces[0] = piece._replace(left_s=piece.left_s - worked_s)
                return 0.0, said
            self._pieces.popleft()
            worked_s = max(0.0, worked_s - piece.left_s)
            if piece.event is not None:
                said.append(piece.event)
        return worked_s, said

    def clear(self) -> None:
        self._pieces.clear()


class QueueWorker:
    """The trainer and the reward: `plan` says what a command means in work."""

    def __init__(self, name: str, plan: Callable[[ev.ExecutorCommand], WorkItem]) -> None:
        self.name, self._plan, self._pieces = name, plan, Pieces()

    @property
    def doing(self) -> str:
        return self._pieces.first.name if self._pieces else ""

    def handle(self, command: ev.ExecutorCommand) -> None:
        self._pieces.add(self._plan(command))

    def due_s(self) -> float:
        return self._pieces.first.left_s if self._pieces else inf

    def advance(self, worked_s: float) -> list[ev.AnyEvent]:
        return self._pieces.advance(worked_s)[1]

    def fall(self) -> None:
        self._pieces.clear()


class GeneratorWorker:
    """One replica: reads the prompts that have arrived, or takes new weights, or else decodes."""

    def __init__(self, name: str, decoding: Decoding, answers: Answers, engine: EngineFactors, load_s: float) -> None:
        self.name, self._decoding, self._answers, self._engine = name, decoding, answers, engine
        self._load_s, self._version = load_s, -1
        self._arrived: list[ev.RunGroup] = []
        self._pieces = Pieces()
        self._under_way: dict[int, tuple[int, int]] = {}  # ordinal -> incarnation, version of the first token

    @property
    def doing(self) -> str:
        if self._pieces:
            return self._pieces.first.name
        return "decode" if self._under_way or self._arrived else ""

    def handle(self, command: ev.ExecutorCommand) -> None:
        match command:
            case ev.RunGroup():
                self._arrived.append(command)
            case ev.Load():
                done = ev.Loaded(command.executor, command.incarnation, command.version)
                self._pieces.add(WorkItem(self._load_s + self._engine.message_s, "load", done))
            case _:
                raise AssertionError(f"a generator is not told {command}")

    def due_s(self) -> float:
        self._begin()
        return self._pieces.first.left_s if self._pieces else self._decoding.due_s()

    def advance(self, worked_s: float) -> list[ev.AnyEvent]:
        self._begin()
        worked_s, said = self._pieces.advance(worked_s)
        for event in said:
            if isinstance(event, ev.Loaded):
                self._version = event.version
        if not self._pieces:
            said += [self._done(ordinal) for ordinal in self._decoding.advance(worked_s)]
        return said

    def fall(self) -> None:
        self._arrived.clear()
        self._pieces.clear()
        self._under_way.clear()
        self._decoding.clear()
        self._version = -1

    def _begin(self) -> None:
        """Prompts that arrived at the same time are read together; then their answers start."""
        if not self._arrived:
            return
        count = len(self._arrived)
        self._pieces.add(WorkItem(self._decoding.replica.prefill_s(count) + count * self._engine.group_s, "prefill"))
        for command in self._arrived:
            lengths = self._answers.of(command.ordinal)
            self._decoding.start(command.ordinal, lengths[:1] if command.kind == "evaluation" else lengths)
            self._under_way[command.ordinal] = (command.incarnation, self._version)
        self._arrived.clear()

    def _done(self, ordinal: int) -> ev.GroupDone:
        incarnation, version = self._under_way.pop(ordinal)
        facts = GroupFacts(self._answers.tokens(ordinal), version, self._version)
        return ev.GroupDone(self.name, incarnation, ordinal, facts)
