"""The batch side of the controller: updates in order, versions published, snapshots, and rewinding after a death.

Update u turns version u into u + 1. A role that trains may begin its next update as soon as it was told to publish, and
where one is due to save, the version it has just made; both then run beside that update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamarl.controller.events import AnyCommand, Commit, Publish, RunBatch, Save
from llamarl.controller.line import Line, Role
from llamarl.controller.pool import ExecutorState
from llamarl.controller.probe import Probes


@dataclass(eq=False)
class Stage:
    """One role that trains."""

    executor: ExecutorState
    publishes: bool
    next_update: int = 0  # also the version that its weights are at
    running: int | None = None
    unpublished: int | None = None  # a version it holds that must be published before it trains on
    publishing: int | None = None
    published: int = -1
    unsaved: int | None = None  # likewise, a version that must be saved before it trains on
    saving: int | None = None
    saved: int = 0  # its part is written; the snapshot may still lack others
    furthest: int = 0  # the newest version it ever made: what it makes again after a rewind is no progress
    skipped_since: int | None = None  # the first of the updates in a row, up to the last, that changed nothing

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
        self, line: Line, updates: int, save_every: int, probes: Probes, tell: Callable[[AnyCommand], None]
    ) -> None:
        self.stages = [
            Stage(ExecutorState(f"{role.name}/0", role, 0, position, False), role.name in line.publishers)
            for position, role in enumerate(line.batch_roles)
        ]
        self.batches: dict[int, tuple[int, ...]] = {}  # by update, until they are forgotten
        self.assembled = 0  # updates whose batch is known
        self.saved = 0  # the newest whole snapshot of a visible version; 0 is the model that the job began with
        self.snapshot: int | None = None  # the version that is being saved
        self._uncommitted: int | None = None  # the same, once all parts are written
        self.final_version = updates  # no update is begun once it is made
        self._save_every, self._probes = save_every, probes
        self._tell = tell
        self.may_publish: Callable[[int], bool] = lambda version: True
        self.may_commit: Callable[[int], bool] = lambda version: True

    @property
    def trained(self) -> int:
        """Updates that every stage has made."""
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
        self.assembled = self.saved = version
        for stage in self.stages:
            stage.next_update = stage.saved = stage.furthest = version

    def started(self, stage: Stage) -> None:
        if stage.publishes and stage.next_update > stage.published:
            stage.unpublished = stage.next_update

    def batch_done(self, stage: Stage, update: int, skipped: bool) -> bool:
        if stage.running != update:
            return False  # a duplicate
        stage.running = None
        stage.next_update = update + 1
        if update >= stage.furthest:
            stage.furthest, stage.executor.failures = update + 1, 0
        stage.note_skipped(update, skipped)
        # While updates are redone after a rewind, only the newest published version has readers.
        if stage.publishes and stage.next_update >= stage.published:
            stage.unpublished = stage.next_update
        self._begin_snapshot(stage)
        return True

    def version_published(self, stage: Stage, version: int) -> bool:
        if stage.publishing != version:
            return False
        stage.publishing = None
        stage.published = version
        return True

    def part_saved(self, stage: Stage, version: int) -> None:
        if stage.saving == version:
            stage.saving, stage.saved = None, version
            if all(one.saved == version for one in self.stages):
                self._uncommitted = version

    def give_up_snapshot(self) -> None:
        """Whatever was being saved is void; the next one that is due begins afresh."""
        self.snapshot = self._uncommitted = None
        for stage in self.stages:
            stage.unsaved = stage.saving = None

    def rewind(self, stage: Stage) -> None:
        """The stage died and comes back from the last snapshot; the same batches follow in the same order."""
        stage.next_update = stage.saved = self.saved
        stage.running = stage.publishing = stage.unpublished = None
        self.give_up_snapshot()

    def stop_early(self) -> None:
        """Begin no further update, but let every stage reach the version that the furthest is at or making."""
        self.final_version = max(stage.next_update + (stage.running is not None) for stage in self.stages)

    def save_now(self, version: int) -> None:
        """All stages are at `version` and at rest."""
        if self.snapshot is None:
            self.snapshot = version
            for stage in self.stages:
                stage.unsaved = version

    def advance(self) -> None:
        """Publish, save and train whatever may be published, saved and trained now."""
        self._commit()
        done_before = self.assembled
        for stage in self.stages:
            if stage.executor.up:
                self._publish(stage)
                self._save(stage)
                self._run(stage, limit=min(done_before, self.final_version))
            done_before = stage.next_update

    def _commit(self) -> None:
        """A snapshot all of whose parts are written."""
        if self._uncommitted is not None and self.may_commit(self._uncommitted):
            self._tell(Commit(self._uncommitted))
            self._uncommitted = None

    def _begin_snapshot(self, stage: Stage) -> None:
        """One at a time: one that falls due while another is being written is left out; `save_now` makes the last."""
        version = stage.next_update
        due = self._save_every > 0 and version % self._save_every == 0
        if due and self.snapshot is None and version > self.saved:
            self.snapshot = version
        if self.snapshot == version:
            stage.unsaved = version

    def _publish(self, stage: Stage) -> None:
        version = stage.unpublished
        if version is None or stage.publishing is not None:
            return
        # Two slots: the one that will be overwritten holds version - 2, which nobody is sent to any more. The first
        # publication of all, of version 0 or of the snapshot that a job resumes from, has nothing to overwrite.
        if stage.published >= 0 and (self.visible < version - 1 or not self.may_publish(version)):
            return
        stage.publishing, stage.unpublished = version, None
        self._tell(Publish(stage.executor.name, stage.executor.incarnation, version))

    def _save(self, stage: Stage) -> None:
        if stage.unsaved is not None:
            stage.saving, stage.unsaved = stage.unsaved, None
            self._tell(Save(stage.executor.name, stage.executor.incarnation, stage.saving))

    def _run(self, stage: Stage, limit: int) -> None:
        update = stage.next_update
        if stage.running is not None or stage.unpublished is not None or update >= limit:
            return
        # After a rewind, versions before the newest published one are in no generator any more: nothing to compare with.
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
