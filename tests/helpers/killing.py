"""Ends a job from inside, at an exact place."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from llamarl.builders.context import BuildContext
from llamarl.builders.trainer import build_trainer
from llamarl.executors.executor import Executor
from llamarl.messages import Message, Report, WorkOnBatch


class Killed(BaseException):
    """A simulated kill. Not an Exception, so that nothing catches it and cleans up, as nothing could after a real kill."""


class MortalTrainer:
    """A trainer that dies when it receives the batch of one update, before reading it."""

    def __init__(self, trainer: Executor, at_update: int) -> None:
        self._trainer, self._at_update = trainer, at_update

    @property
    def idle(self) -> bool:
        return self._trainer.idle

    def handle(self, message: Message) -> Iterable[Report]:
        if isinstance(message, WorkOnBatch) and message.update == self._at_update:
            raise Killed
        return self._trainer.handle(message)

    def work(self) -> Iterable[Report]:
        return self._trainer.work()


class KillAt:
    """A builder whose trainer dies at the given update."""

    def __init__(self, update: int) -> None:
        self._update = update

    def __call__(self, context: BuildContext) -> Executor:
        return MortalTrainer(build_trainer(context), self._update)


class CopiedTrainer:
    """Copies the run folder to `copies`/N when it is given the batch of update N: what a kill at that moment would leave.

    Only the snapshot that is written beside training may change meanwhile; a copy that this breaks is made again."""

    def __init__(self, trainer: Executor, run: Path, copies: Path) -> None:
        self._trainer, self._run, self._copies = trainer, run, copies

    @property
    def idle(self) -> bool:
        return self._trainer.idle

    def handle(self, message: Message) -> Iterable[Report]:
        while isinstance(message, WorkOnBatch):
            try:
                shutil.copytree(self._run, self._copies / str(message.update))
                break
            except (shutil.Error, FileNotFoundError):
                shutil.rmtree(self._copies / str(message.update))
        return self._trainer.handle(message)

    def work(self) -> Iterable[Report]:
        return self._trainer.work()


class CopyAtEach:
    """A builder whose trainer copies the run folder at each update."""

    def __init__(self, run: Path, copies: Path) -> None:
        self._run, self._copies = run, copies

    def __call__(self, context: BuildContext) -> Executor:
        return CopiedTrainer(build_trainer(context), self._run, self._copies)


TINY: Sequence[str] = (
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "generator.slots=32",
    "generator.threads=1",
    "trainer.threads=1",
    "generator.device=cpu",
    "trainer.device=cpu",
    "trainer.lr=1e-4",
)
