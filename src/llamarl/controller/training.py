"""The batch side of the controller: updates in order, versions made visible, and rewinding after a death.

Update u turns version u into u + 1. A role that trains may begin its next update as soon as it was told to publish the
version it has just made; publication then runs beside that update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamarl.controller.events import AnyCommand, Publish, RunBatch
from llamarl.controller.line import Line, Role
from llamarl.controller.pool import Executor


@dataclass(eq=False)
class Stage:
    """One role that trains."""

    executor: Executor
    publishes: bool
    next_update: int = 0  # also the version that its weights are at
    running: int | None = None
    unpublished: int | None = None  # a version it holds that must be published before it trains on
    publishing: int | None = None
    published: int = -1

    @property
    def role(self) -> Role:
        return self.executor.role


class Training:
    def __init__(self, line: Line, tell: Callable[[AnyCommand], None]) -> None:
        self.stages = [
            Stage(Executor(f"{role.name}/0", role, 0, position, False), role.name in line.publishers)
            for position, role in enumerate(line.batch_roles)
        ]
        self.batches: dict[int, tuple[int, ...]] = {}  # by update, until they are forgotten
        self.assembled = 0  # updates whose batch is known
        self.saved = 0  # the newest snapshot; 0 is the model that the job began with
        self._tell = tell

    @property
    def trained(self) -> int:
        """Updates that every stage has made."""
        return min(stage.next_update for stage in self.stages)

    @property
    def visible(self) -> int:
        """The newest version that every stage has made and every publisher has published; -1 before the first."""
        return min(stage.published if stage.publishes else stage.next_update for stage in self.stages)

    def stage_of(self, executor: Executor) -> Stage:
        return self.stages[executor.position]

    def add_batch(self, ordinals: tuple[int, ...]) -> None:
        self.batches[self.assembled] = ordinals
        self.assembled += 1

    def started(self, stage: Stage) -> None:
        if stage.publishes and stage.next_update > stage.published:
            stage.unpublished = stage.next_update

    def batch_done(self, stage: Stage, update: int) -> bool:
        if stage.running != update:
            return False  # a duplicate
        stage.running = None
        stage.next_update = update + 1
        # While updates are redone after a rewind, only the newest published version has readers.
        if stage.publishes and stage.next_update >= stage.published:
            stage.unpublished = stage.next_update
        return True

    def version_published(self, stage: Stage, version: int) -> bool:
        if stage.publishing != version:
            return False
        stage.publishing = None
        stage.published = version
        return True

    def rewind(self, stage: Stage) -> None:
        """The stage died and comes back from the last snapshot; the same batches follow in the same order."""
        stage.next_update = self.saved
        stage.running = stage.publishing = stage.unpublished = None

    def advance(self) -> None:
        """Publish and train whatever may be published and trained now."""
        done_before = self.assembled
        for stage in self.stages:
            if stage.executor.up:
                self._publish(stage)
                self._run(stage, limit=done_before)
            done_before = stage.next_update

    def _publish(self, stage: Stage) -> None:
        version = stage.unpublished
        # Two slots: the one that will be overwritten holds version - 2, which nobody is sent to any more.
        if version is None or stage.publishing is not None or self.visible < version - 1:
            return
        stage.publishing, stage.unpublished = version, None
        self._tell(Publish(stage.executor.name, stage.executor.incarnation, version))

    def _run(self, stage: Stage, limit: int) -> None:
        update = stage.next_update
        if stage.running is not None or stage.unpublished is not None or update >= limit:
            return
        stage.running = update
        self._tell(RunBatch(stage.executor.name, stage.executor.incarnation, update, self.batches[update]))
