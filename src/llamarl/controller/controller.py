"""The controller: `handle(event) -> commands`. It admits prompts, moves groups down the line, decides when weights change.

The rules, in the words of docs/architecture.md:
- The job has (S+1)*P places. A group takes one when it is admitted; its batch frees P when the version that the batch made
  is visible, not when it was trained. Hence the bound on staleness, and nothing stale is ever thrown away.
- A group goes to the replica with the fewest groups among those that hold the newest visible version and have room.
- A batch is P ordinals, consecutive or (window) nearly so. Dropped groups keep their ordinal's place in it, empty.
- Death: what the executor held is handed out again under the same ordinals; a role that trains is rewound.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from llamarl.config import EvaluateConfig, ScheduleConfig, SnapshotsConfig
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.evaluation import Evaluation, is_evaluation
from llamarl.controller.line import Line, role_of
from llamarl.controller.order import ExactOrder, NewestOrder, Order
from llamarl.controller.pool import ExecutorPool, ExecutorState
from llamarl.controller.probe import Probes, is_probe
from llamarl.controller.training import Training
from llamarl.controller.window import Window
from llamarl.types import GroupFacts

MAX_FAILED_LOADS = 3
NO_SNAPSHOTS = SnapshotsConfig(every=0)


class Controller:
    def __init__(
        self, line: Line, schedule: ScheduleConfig, evaluate: EvaluateConfig, snapshots: SnapshotsConfig = NO_SNAPSHOTS
    ) -> None:
        self.line, self.schedule, self.snapshots = line, schedule, snapshots
        self.pools = [
            ExecutorPool(role, at, role.name in line.weights_source) for at, role in enumerate(line.group_roles)
        ]
        self.probes = Probes(schedule)
        self.training = Training(line, schedule.updates, snapshots.every, self.probes, self._say)
        self.order: Order = ExactOrder(self) if schedule.deterministic else NewestOrder(self)
        self.training.may_publish, self.training.may_commit = self.order.may_publish, self.order.may_commit
        self.window = Window(schedule.groups_per_update, schedule.window)
        self.evaluation = Evaluation(evaluate, schedule.updates)
        self.executors: dict[str, ExecutorState] = {
            executor.name: executor
            for executor in [one for pool in self.pools for one in pool.executors]
            + [stage.executor for stage in self.training.stages]
        }
        self.next_ordinal = 0
        self.places_used = 0
        self.newest = -1  # the newest visible version
        self.finished = False
        self.stopping = False
        self._resumed_at = 0  # the version that this run began with
        self._recovered: set[int] = set()  # settled before this run began, and not yet admitted in it
        self._attempts: dict[int, int] = {}  # deaths that a group has seen
        self._unseen_snapshots: set[int] = set()  # whole, but of versions that are not visible yet
        # Per group role, a heap of (rank, ordinal): groups that need an executor, in the order in which they get one.
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in self.pools]
        self._dropped: set[int] = set()
        self._commands: list[ev.AnyCommand] = []
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Began: self._on_began,
            ev.Started: self._on_started,
            ev.Loaded: self._on_loaded,
            ev.LoadFailed: self._on_load_failed,
            ev.GroupDone: self._on_group_done,
            ev.GroupFailed: self._on_group_failed,
            ev.GaveUp: lambda event: self._end(ev.Abort(event.reason), closed=f"stopped: {event.reason}"),
            ev.BatchDone: self._on_batch_done,
            ev.Published: self._on_published,
            ev.Died: self._on_died,
            ev.Saved: self._on_saved,
            ev.Committed: self._on_committed,
            ev.SaveFailed: self._on_save_failed,
            ev.Resumed: self._on_resumed,
            ev.StopRequested: self._on_stop_requested,
        }

    def handle(self, event: ev.AnyEvent) -> list[ev.AnyCommand]:
        """The whole interface. Words of earlier incarnations, duplicates and anything after the end are ignored."""
        if not self.finished and not self._is_void(event):
            self._handlers[type(event)](event)
            self._advance()
        commands, self._commands = self._commands, []
        return commands

    # Events

    def _on_began(self, event: ev.Began) -> None:
        self._write(ledger.Opened(self.schedule.num_groups, self.schedule.groups_per_update))
        for executor in self.executors.values():
            self._say(ev.Start(executor.name, executor.incarnation, version=0))

    def _on_resumed(self, event: ev.Resumed) -> None:
        """Batches that were made before are made again, the same and in the same order. Everything else is admitted
        anew, in order and as places allow, so that the bound holds; what was settled already is not generated again."""
        self._resumed_at = event.version
        self.training.resume(event.version)
        self.evaluation.resume(event.evaluated)
        self._dropped = set(event.dropped)
        self._recovered = set(event.settled)
        for batch in event.batches:
            self.training.add_batch(batch)
            self.places_used += len(batch)
        self.window.resume(event.oldest, event.taken)
        self.next_ordinal = event.oldest
        self._write(ledger.Rewound(event.version, ledger.RESUME, event.run))
        self._write(ledger.Opened(self.schedule.num_groups, self.schedule.groups_per_update))
        for executor in self.executors.values():
            self._say(ev.Start(executor.name, executor.incarnation, version=event.version))

    def _on_started(self, event: ev.Started) -> None:
        executor = self.executors[event.executor]
        if executor.up:
            return  # a duplicate
        executor.up = True
        if executor.role.unit == "batch":
            self.training.started(self.training.stage_of(executor))
        else:
            self._make_available(executor)

    def _on_loaded(self, event: ev.Loaded) -> None:
        executor = self.executors[event.executor]
        if executor.loading == event.version:
            executor.version, executor.loading, executor.failed_loads = event.version, None, 0
            self._make_available(executor)

    def _on_load_failed(self, event: ev.LoadFailed) -> None:
        executor = self.executors[event.executor]
        if executor.loading != event.version:
            return
        executor.loading = None
        if event.version == self.order.target(executor):  # otherwise a newer version took its slot, which is no failure
            executor.failed_loads += 1
        if executor.failed_loads == MAX_FAILED_LOADS:
            self._end(ev.Abort(f"{executor.name}: {event.reason}"), closed=f"stopped: {event.reason}")
        else:
            self._make_available(executor)

    def _on_group_done(self, event: ev.GroupDone) -> None:
        if (executor := self._holder(event)) is None:
            return
        executor.release(event.ordinal)
        if is_evaluation(event.ordinal):
            self.evaluation.passed(event.ordinal, executor)
        elif not is_probe(event.ordinal):
            self._write(_passed(event.ordinal, executor.role.done, event.facts))
        self._make_available(executor)
        if is_probe(event.ordinal):
            self.probes.answered(event.ordinal)
        else:
            self._move_on(event.ordinal, executor.position + 1)

    def _on_group_failed(self, event: ev.GroupFailed) -> None:
        if (executor := self._holder(event)) is None:
            return
        executor.release(event.ordinal)
        if is_evaluation(event.ordinal):
            self.evaluation.passed(event.ordinal, executor)
            self._move_on(event.ordinal, len(self.pools))
        elif is_probe(event.ordinal):
            self._give_up_probe(event.ordinal)
        else:
            self._drop(event.ordinal, event.reason)
        self._make_available(executor)

    def _give_up_probe(self, ordinal: int) -> None:
        self.probes.failed(ordinal)
        self._say(ev.Forget((ordinal,)))

    def _on_batch_done(self, event: ev.BatchDone) -> None:
        trained = self.training.trained
        stage = self.training.stage_of(self.executors[event.executor])
        if not self.training.batch_done(stage, event.update, event.skipped):
            return
        for update in range(trained, self.training.trained):
            self._record_trained(update)
        if stage.publishes and (measured := self.probes.measured(event.update)):
            self._say(ev.Forget(measured))
        if stage.skipped_in_a_row >= self.schedule.max_skipped:
            reason = (
                f"{stage.executor.name} skipped {stage.skipped_in_a_row} updates in a row, "
                f"{stage.skipped_since} to {event.update}: loss or gradient was not a number"
            )
            self._end(ev.Abort(reason), closed=f"stopped: {reason}")

    def _on_published(self, event: ev.Published) -> None:
        stage = self.training.stage_of(self.executors[event.executor])
        if not self.training.version_published(stage, event.version):
            return
        if event.version == self.newest and event.changed:
            self._reload(stage.role.name)

    def _on_died(self, event: ev.Died) -> None:
        executor = self.executors[event.executor]
        executor.dead = True
        ordinals = executor.reset()
        executor.failures += 1
        if not executor.role.restartable or executor.failures > self.schedule.max_restarts:
            self._end(ev.Abort(_why_stopped(executor, event.reason)), closed=f"stopped: {event.reason}")
            return
        if executor.role.unit == "batch":
            self._rewind(executor)
        else:
            self.evaluation.lost(executor)
            for ordinal in ordinals:
                self._return(ordinal, executor.position, event.reason)
        executor.incarnation += 1
        executor.dead = False
        self._say(ev.Start(executor.name, executor.incarnation, version=self.training.saved))

    def _on_saved(self, event: ev.Saved) -> None:
        self.training.part_saved(self.training.stage_of(self.executors[event.executor]), event.version)

    def _on_committed(self, event: ev.Committed) -> None:
        if self.training.snapshot == event.version:
            self.training.snapshot = None
            self._unseen_snapshots.add(event.version)
            self._count_snapshots()

    def _on_save_failed(self, event: ev.SaveFailed) -> None:
        if self.training.snapshot != event.version:
            return
        self.training.give_up_snapshot()
        if event.version == self.training.final_version:
            reason = f"the last snapshot could not be written: {event.reason}"
            self._end(ev.Abort(reason), closed=f"stopped: {reason}")

    def _on_stop_requested(self, event: ev.StopRequested) -> None:
        if not self.stopping:
            self.stopping = True
            self.training.stop_early()

    # What follows from the new state

    def _advance(self) -> None:
        if self.finished:
            return
        self.training.advance()
        while self.newest < self.training.visible:
            # One by one, for evaluations; a resumed job begins with the version of its snapshot.
            self._make_visible(max(self.newest + 1, self._resumed_at))
            self.training.advance()
        for position in range(len(self.pools) - 1, 0, -1):
            self._hand_out(position)
        self._admit()
        if self.order.has_moved():
            for executor in self.pools[0].executors:
                self._offer_weights(executor)
        if self.training.trained == self.training.final_version:
            self._wind_up(self.training.final_version)

    def _wind_up(self, version: int) -> None:
        """No update will follow: make sure of the last snapshot, finish the last evaluation, end."""
        if self._lacks_snapshot(version):
            self.training.save_now(version)
            self.training.advance()
        elif self.stopping:
            self._end(ev.Finish(stopped=True), closed=f"stopped on request after update {version}")
        elif self.newest == version and self.evaluation.all_done:
            self._end(ev.Finish(), closed=ledger.FINISHED)

    def _lacks_snapshot(self, version: int) -> bool:
        """One that has been begun is always finished; who is stopped will go on, and needs one."""
        if version in self._unseen_snapshots or version == self.training.saved:
            return False
        return self.stopping or self.snapshots.at_end != "none" or self.training.snapshot is not None

    def _make_visible(self, version: int) -> None:
        self.newest = version
        self._write(ledger.Visible(version))
        if version > self._resumed_at:
            self.places_used -= self.schedule.groups_per_update
            if not self._keeps_for_rewind:
                self._forget(version - 1)
        self._count_snapshots()
        self.evaluation.version_visible(version)
        for executor in self.executors.values():
            self._offer_weights(executor)

    def _admit(self) -> None:
        """Groups for the first role: those that a death returned, then evaluation, then new ones while places last."""
        pool, returned = self.pools[0], self.waiting[0]
        version = self.training.to_be_probed
        if version is not None and version == self.newest and (probe := self.probes.issue(version)) is not None:
            self._wait(0, probe)
        self._hand_out(0)
        for executor, ordinal in self.evaluation.assign(pool, self.newest, exact=self.schedule.deterministic):
            self._assign(executor, ordinal, num_completions=1)
        samples = self.schedule.samples_per_group
        while self.may_admit and not (returned and returned[0][0] <= self.order.priority(self.next_ordinal)):
            if self._skip_known():
                continue
            chosen = pool.least_busy(samples, self.order.version_for(self.next_ordinal))
            if chosen is None:
                return
            self.places_used += 1
            self._assign(chosen, self.next_ordinal, samples)
            self.next_ordinal += 1

    def _skip_known(self) -> bool:
        """After a resume: the next ordinal may be in a batch already, or settled, and then only needs its place."""
        ordinal = self.next_ordinal
        if self.window.is_taken(ordinal):
            self.next_ordinal += 1
            return True
        if ordinal in self._recovered:
            self._recovered.remove(ordinal)
            self.next_ordinal += 1
            self.places_used += 1
            self._move_on(ordinal, len(self.pools))
            self.training.advance()
            return True
        return False

    def _hand_out(self, position: int) -> None:
        waiting, pool = self.waiting[position], self.pools[position]
        while waiting:
            ordinal = waiting[0][1]
            num_completions = 1 if is_evaluation(ordinal) else self.schedule.samples_per_group
            executor = pool.least_busy(num_completions, self.order.version_for(ordinal))
            if executor is None:
                return
            heapq.heappop(waiting)
            self._assign(executor, ordinal, num_completions)

    def _wait(self, position: int, ordinal: int) -> None:
        heapq.heappush(self.waiting[position], (self.order.priority(ordinal), ordinal))

    def _assign(self, executor: ExecutorState, ordinal: int, num_completions: int) -> None:
        executor.assign(ordinal, num_completions)
        self.pools[executor.position].touch(executor)
        if executor.position == 0 and ordinal >= 0:
            self._write(ledger.Issued(ordinal, executor.name, executor.version))
        self._say(ev.RunGroup(executor.name, executor.incarnation, ordinal))

    def _move_on(self, ordinal: int, position: int) -> None:
        if position < len(self.pools):
            self._wait(position, ordinal)
        elif not is_evaluation(ordinal):
            for batch in self.window.settle(ordinal):
                self.training.add_batch(batch)
        elif not self.evaluation.owns(ordinal):
            self._say(ev.Forget((ordinal,)))
        elif finished := self.evaluation.settled(ordinal):
            self._say(ev.Evaluated(finished.version, finished.ordinals))
            self._say(ev.Forget(finished.ordinals))

    def _drop(self, ordinal: int, reason: str) -> None:
        self._dropped.add(ordinal)
        self._write(ledger.Dropped(ordinal, reason))
        self._move_on(ordinal, len(self.pools))

    def _give_up(self, ordinal: int, reason: str) -> None:
        """Drop the group; in deterministic mode timing must not choose what is trained, so the job stops instead."""
        if self.schedule.deterministic:
            self._end(ev.Abort(f"group {ordinal}: {reason}"), closed=f"stopped: group {ordinal}: {reason}")
        else:
            self._drop(ordinal, reason)

    def _return(self, ordinal: int, position: int, reason: str) -> None:
        """The holder died: the group waits for another executor of the same role, unless it seems to be the cause."""
        self._attempts[ordinal] = attempts = self._attempts.get(ordinal, 0) + 1
        if is_probe(ordinal) and attempts >= self.schedule.max_attempts:
            self._give_up_probe(ordinal)
        elif ordinal >= 0 and attempts >= self.schedule.max_attempts:
            self._give_up(ordinal, f"its executor died {attempts} times, the last time: {reason}")
        elif is_evaluation(ordinal) and not self.evaluation.owns(ordinal):
            self._say(ev.Forget((ordinal,)))
        else:
            self._wait(position, ordinal)

    def _make_available(self, executor: ExecutorState) -> None:
        self._offer_weights(executor)
        self.pools[executor.position].touch(executor)

    def _offer_weights(self, executor: ExecutorState) -> None:
        """An executor takes the weights that it should have, unless it is answering an evaluation."""
        if not executor.reads_weights or not executor.up or executor.loading is not None:
            return
        version = self.order.target(executor)
        if executor.version != version >= 0 and not self.evaluation.pins(executor):
            executor.loading = version
            self._say(ev.Load(executor.name, executor.incarnation, version))

    # Training's edges

    def _record_trained(self, update: int) -> None:
        ordinals = self.training.batches[update]
        dropped = tuple(ordinal for ordinal in ordinals if ordinal in self._dropped)
        self._write(ledger.Trained(update, tuple(o for o in ordinals if o not in dropped), dropped))
        self._say(ev.Sync())

    def _count_snapshots(self) -> None:
        """A snapshot counts once its version is visible: who comes back from it has nothing older left to publish."""
        seen = {version for version in self._unseen_snapshots if version <= self.newest}
        self._unseen_snapshots -= seen
        covered = range(self.training.saved, max(seen, default=0))
        self.training.saved = max(self.training.saved, covered.stop)
        if covered:
            self._say(ev.Prune(self.training.saved))
            if measured := self.probes.covered(self.training.saved):
                self._say(ev.Forget(measured))
        if self._keeps_for_rewind:
            for update in covered:
                self._forget(update)

    def _rewind(self, executor: ExecutorState) -> None:
        trained = self.training.trained
        self.training.rewind(self.training.stage_of(executor))
        if void := self.probes.rewind():
            self._say(ev.Forget(void))
        if self.training.trained < trained:
            self._unseen_snapshots.clear()
            self._write(ledger.Rewound(self.training.trained, executor.name))

    def _reload(self, publisher: str) -> None:
        """A redone version came out with other bytes: whoever holds it takes it again."""
        for executor in self.executors.values():
            if executor.version == self.newest and self.line.weights_source.get(executor.role.name) == publisher:
                executor.version = -1
                self._offer_weights(executor)

    @property
    def _keeps_for_rewind(self) -> bool:
        return any(role.restartable for role in self.line.batch_roles)

    def _forget(self, update: int) -> None:
        ordinals = self.training.batches.pop(update)
        self._say(ev.Forget(ordinals))
        self._dropped.difference_update(ordinals)
        for ordinal in ordinals:
            self._attempts.pop(ordinal, None)

    # Small things

    @property
    def may_admit(self) -> bool:
        """The next group exists, there is a place for it, and it will be needed."""
        end = self.order.last_needed if self.stopping else self.schedule.num_groups
        return self.next_ordinal < end and self.places_used < self.schedule.num_places

    def _is_void(self, event: ev.AnyEvent) -> bool:
        """A word of the dead, or one that this executor has no business to say."""
        if not isinstance(event, ev.ExecutorEvent):
            return False
        executor = self.executors[event.executor]
        of_training = isinstance(event, ev.BatchDone | ev.Published | ev.Saved)
        return event.incarnation != executor.incarnation or (of_training and executor.role.unit != "batch")

    def _holder(self, event: ev.GroupDone | ev.GroupFailed) -> ExecutorState | None:
        """Who reports, if it really holds the group: otherwise the report is a duplicate."""
        executor = self.executors[event.executor]
        return executor if event.ordinal in executor.groups else None

    def _say(self, command: ev.AnyCommand) -> None:
        self._commands.append(command)

    def _write(self, record: ledger.Record) -> None:
        self._commands.append(ev.Write(record))

    def _end(self, command: ev.Finish | ev.Abort, closed: str) -> None:
        self.finished = True
        self._write(ledger.Closed(closed))
        self._say(ev.Sync())
        self._say(command)


def _passed(ordinal: int, state: str, facts: GroupFacts) -> ledger.Passed:
    return ledger.Passed(ordinal, state, facts.num_tokens, facts.first_version, facts.last_version, facts.reward)


def _why_stopped(executor: ExecutorState, reason: str) -> str:
    if not executor.role.restartable:
        return f"{executor.name} died: {reason}; a {role_of(executor.name)} of this line cannot be restarted"
    return f"{executor.name} died {executor.failures} times in a row, the last time: {reason}"
