"""Executors that only spend time in the place of real ones, whose weights are really published and loaded; for benchmarks
of the engine. What a run of them took is read from its run folder."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from llamarl.algo.metrics import describe_groups
from llamarl.executors.executor import Executor
from llamarl.messages import BatchResult, GroupResult, Message, Report, WorkOnBatch, WorkOnGroup
from llamarl.types import Completion, CompletionGroup, PromptGroup, VersionRun, floats_to_bytes, tokens_to_bytes

GROUPS, SAMPLES = 8, 4  # of an update, of a group
_TOKEN, _LOGPROB = tokens_to_bytes([1]), floats_to_bytes([0.0])


class PretendedGenerator(ABC):
    """Takes groups and answers them when it likes; loads weights as a real one."""

    def __init__(self, honest: Executor) -> None:
        self._honest = honest
        self._version = 0

    @property
    @abstractmethod
    def idle(self) -> bool: ...

    @abstractmethod
    def take(self, group: PromptGroup) -> None: ...

    @abstractmethod
    def work(self) -> Iterable[Report]: ...

    def handle(self, message: Message) -> Iterable[Report]:
        if isinstance(message, WorkOnGroup) and isinstance(message.group, PromptGroup):
            self.take(message.group)
            return ()
        self._version = getattr(message, "version", self._version)
        return self._honest.handle(message)

    def answer(self, group: PromptGroup) -> GroupResult:
        answer = Completion(_TOKEN, _LOGPROB, (VersionRun(self._version, 1),), truncated=False)
        return GroupResult(CompletionGroup(group, (answer,) * SAMPLES))


class PretendedTrainer:
    """Spends the time of an update without changing a weight; publishes and saves as a real one."""

    def __init__(self, honest: Executor, spend: Callable[[], None]) -> None:
        self._honest, self._spend = honest, spend

    @property
    def idle(self) -> bool:
        return self._honest.idle

    def handle(self, message: Message) -> Iterable[Report]:
        if not isinstance(message, WorkOnBatch):
            return self._honest.handle(message)
        self._spend()
        return [BatchResult(message.update, describe_groups(message.groups))]

    def work(self) -> Iterable[Report]:
        return self._honest.work()


def update_times(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "timings.jsonl").read_text().splitlines())
    return [row["at_s"] for row in rows if "update" in row]
