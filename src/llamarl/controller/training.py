"""The batch side of the controller: updates in order, versions published, and rewinding after a death.

Update u turns version u into u + 1. A role that trains may begin its next update as soon as it was told to publish the
version that it has just made and, where a snapshot is due, to save it. Both then run beside that update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamarl.controller.events import AnyCommand, Commit, Publish, RunBatch, Save
from llamarl.controller.line import Line, Role
from llamarl.controller.pool import ExecutorState
from llamarl.controller.probe import Probes
from llamarl.controller.snapshot_schedule import SnapshotSchedule


@dataclass(eq=False)
class Stage:
    """The state of one role that trains."""

    executor: ExecutorState
    publishes: bool
    next_update: int = 0  # also the version of its weights
    running: int | None = None  # the update under way
    unpublished: int | None = None  # a version that it must publish before it trains on
    publishing: int | None = None
    published: int = -1  # the newest published version
    furthest: int = 0  # the newest version it ever made; making one again after a rewind is no progress
    skipped_since: int | None = None  # the first of the latest updates in a row that changed nothing

    @property
    def role(self) -> Role:
        return self.executor.role

    @property
    def skipped_in_a_row(self) -> int:
        return 0 if self.skipped_since is None else self.next_update - self.skipped_since

    def note_skipped(self, update: int, skipped: bool) -> None:
        """Updates that are made again after a rewind are not counted twice."""
        if not skipped:
            self.skipped_since = None
        elif self.skipped_since is None or update < self.skipped_since:
            self.skipped_since = update


class Training:
    def __init__(
        self,
        line: Line,
        updates: int,
        snapshots: SnapshotSchedule,
        probes: Probes,
        tell: Callable[[AnyCommand], None],
    ) -> None:
        self.stages = [
            Stage(ExecutorState(f"{role.name}/0", role, 0, position, False), role.name in line.publishers)
            for position, role in enumerate(line.batch_roles)
        ]
        self.batches: dict[int, tuple[int, ...]] = {}  # by update, until they are forgotten
        self.assembled = 0  # number of updates whose batch is known
        self.final_version = updates  # no further update is begun once it is made
        self._snapshots, self._probes, self._tell = snapshots, probes, tell

    @property
    def trained(self) -> int:
        """Number of updates that every stage has made."""
        return min(stage.next_update for stage in self.stages)

    @property
    def visible(self) -> int:
        """The newest version that every stage has made and every publisher has published; -1 before the first."""
        return min(stage.published if stage.publishes else stage.next_update for stage in self.stages)

    def stage_of(self, executor: ExecutorState) -> Stage:
        return self.stages[executor.position]

    def add_batch(self, ordinals: tuple[int, ...]) -> None:
        self.batches[self.assembled] = ordinals
        self.assembled += 1

    def resume(self, version: int) -> None:
        self.assembled = version
        for stage in self.stages:
            stage.next_update = stage.furthest = version

    def started(self, stage: Stage) -> None:
        if stage.publishes and stage.next_update > stage.published:
            stage.unpublished = stage.next_update

    def batch_done(self, stage: Stage, update: int, skipped: bool) -> bool:
        """False: a duplicate."""
        if stage.running != update:
            return False
        stage.running = None
        stage.next_update = update + 1
        if update >= stage.furthest:
            stage.furthest, stage.executor.failures = update + 1, 0
        stage.note_skipped(update, skipped)
        # While updates are redone after a rewind, only the newest published version has readers.
        if stage.publishes and stage.next_update >= stage.published:
            stage.unpublished = stage.next_update
        self._snapshots.made(stage.role.name, self._reached)
        return True

    def version_published(self, stage: Stage, version: int) -> bool:
        """False: a duplicate."""
        if stage.publishing != version:
            return False
        stage.publishing = None
        stage.published = version
        return True

    def rewind(self, stage: Stage) -> None:
        """The stage died and comes back from the last snapshot; the same batches follow in the same order. Stages before it
        that must repeat what they leave for a batch go back with it; what they are at counts as not begun."""
        self._go_back(stage)
        for before in self.stages[: stage.executor.position]:
            if before.role.repeats and before.next_update > stage.next_update:
                self._go_back(before)

    def _go_back(self, stage: Stage) -> None:
        stage.next_update = self._snapshots.saved
        stage.running = stage.publishing = stage.unpublished = None
        self._snapshots.rewind(stage.role.name)

    def stop_early(self) -> None:
        """Begin no further update, but let every stage reach the version that the furthest is at or making."""
        self.final_version = max(stage.next_update + (stage.running is not None) for stage in self.stages)

    def save_last(self, version: int) -> None:
        """All stages are at `version` and at rest: save it."""
        self._snapshots.take(version, self._reached)

    def advance(self, oldest_needed: int | None) -> None:
        """Publish, save and train whatever may be published, saved and trained now. Versions from `oldest_needed` on must
        stay in their slots; None: only the newest one."""
        if (version := self._snapshots.next_commit(self._reached, self.assembled)) is not None:
            self._tell(Commit(version))
        done_before = self.assembled
        for stage in self.stages:
            if stage.executor.up:
                self._publish(stage, oldest_needed)
                self._save(stage)
                self._run(stage, limit=min(done_before, self.final_version))
            done_before = min(done_before, stage.next_update)

    @property
    def _reached(self) -> dict[str, int]:
        return {stage.role.name: stage.next_update for stage in self.stages}

    def _publish(self, stage: Stage, oldest_needed: int | None) -> None:
        version = stage.unpublished
        if version is None or stage.publishing is not None:
            return
        # There are two slots: the one that is overwritten holds version - 2, which no executor is sent to load any more.
        # The first publication, of version 0 or of the snapshot that a job resumes from, overwrites nothing.
        overwrites_needed = oldest_needed is not None and oldest_needed <= version - 2
        if stage.published >= 0 and (self.visible < version - 1 or overwrites_needed):
            return
        stage.publishing, stage.unpublished = version, None
        self._tell(Publish(stage.executor.name, stage.executor.incarnation, version))

    def _save(self, stage: Stage) -> None:
        if (version := self._snapshots.next_part(stage.role.name)) is not None:
            self._tell(Save(stage.executor.name, stage.executor.incarnation, version))

    def _run(self, stage: Stage, limit: int) -> None:
        update = stage.next_update
        if stage.running is not None or stage.unpublished is not None or update >= limit:
            return
        # After a rewind, no generator holds the versions before the newest published one: there is nothing to compare with.
        if stage.publishes and update >= stage.published and self._probes.keeps_waiting(update):
            return
        stage.running = update
        probe = self._probes.ordinal(update) if stage.publishes else None
        self._tell(RunBatch(stage.executor.name, stage.executor.incarnation, update, self.batches[update], probe))

    @property
    def to_be_probed(self) -> int | None:
        """The version that a role which trains holds, has published, and will train next."""
        for stage in self.stages:
            at_rest = stage.running is None and stage.unpublished is None and stage.publishing is None
            version = stage.next_update
            if stage.publishes and at_rest and stage.published == version < self.final_version:
                return version
        return None
