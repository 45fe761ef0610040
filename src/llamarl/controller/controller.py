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

from llamarl.config import Evaluate, Schedule
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.evaluation import Evaluation, is_evaluation
from llamarl.controller.line import Line, role_of
from llamarl.controller.pool import Executor, Pool
from llamarl.controller.training import Training
from llamarl.controller.window import Window
from llamarl.types import GroupFacts

MAX_FAILED_LOADS = 3


class Controller:
    def __init__(self, line: Line, schedule: Schedule, evaluate: Evaluate) -> None:
        self.line, self.schedule = line, schedule
        self.pools = [Pool(role, at, role.name in line.weights_source) for at, role in enumerate(line.group_roles)]
        self.training = Training(line, self._say)
        self.window = Window(schedule.groups_per_update, schedule.window)
        self.evaluation = Evaluation(evaluate, schedule.updates)
        self.executors: dict[str, Executor] = {
            executor.name: executor
            for executor in [one for pool in self.pools for one in pool.executors]
            + [stage.executor for stage in self.training.stages]
        }
        self.next_ordinal = 0
        self.places_used = 0
        self.newest = -1  # the newest visible version
        self.finished = False
        self._saving = False
        self._unseen_snapshots: set[int] = set()  # whole, but of versions that are not visible yet
        self._waiting: list[list[int]] = [[] for _ in self.pools]  # per group role: ordinals that need an executor
        self._dropped: set[int] = set()
        self._commands: list[ev.AnyCommand] = []
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Began: self._on_began,
            ev.Started: self._on_started,
            ev.Loaded: self._on_loaded,
            ev.LoadFailed: self._on_load_failed,
            ev.GroupDone: self._on_group_done,
            ev.GroupFailed: self._on_group_failed,
            ev.BatchDone: self._on_batch_done,
            ev.Published: self._on_published,
            ev.Died: self._on_died,
            ev.Saved: self._on_saved,
        }

    def handle(self, event: ev.AnyEvent) -> list[ev.AnyCommand]:
        """The whole interface. Words of earlier incarnations, duplicates and anything after the end are ignored."""
        if not self.finished and not self._is_outdated(event):
            self._handlers[type(event)](event)
            self._advance()
        commands, self._commands = self._commands, []
        return commands

    # Events

    def _on_began(self, event: ev.Began) -> None:
        self._write(ledger.Opened(self.schedule.num_groups, self.schedule.groups_per_update))
        for executor in self.executors.values():
            self._say(ev.Start(executor.name, executor.incarnation, version=0))

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
        if event.version == self.newest:  # otherwise a newer version took its slot, which is no failure
            executor.failed_loads += 1
        if executor.failed_loads == MAX_FAILED_LOADS:
            self._end(ev.Abort(f"{executor.name}: {event.reason}"), closed=f"stopped: {event.reason}")
        else:
            self._make_available(executor)

    def _on_group_done(self, event: ev.GroupDone) -> None:
        if (executor := self._holder(event)) is None:
            return
        executor.give(event.ordinal)
        if is_evaluation(event.ordinal):
            self.evaluation.passed(event.ordinal, executor)
        else:
            self._write(_passed(event.ordinal, executor.role.done, event.facts))
        self._make_available(executor)
        self._move_on(event.ordinal, executor.position + 1)

    def _on_group_failed(self, event: ev.GroupFailed) -> None:
        if (executor := self._holder(event)) is None:
            return
        executor.give(event.ordinal)
        if is_evaluation(event.ordinal):
            self.evaluation.passed(event.ordinal, executor)
        else:
            self._dropped.add(event.ordinal)
            self._write(ledger.Dropped(event.ordinal, event.reason))
        self._make_available(executor)
        self._move_on(event.ordinal, len(self.pools))

    def _on_batch_done(self, event: ev.BatchDone) -> None:
        trained = self.training.trained
        stage = self.training.stage_of(self.executors[event.executor])
        if self.training.batch_done(stage, event.update):
            for update in range(trained, self.training.trained):
                self._record_trained(update)

    def _on_published(self, event: ev.Published) -> None:
        stage = self.training.stage_of(self.executors[event.executor])
        if not self.training.version_published(stage, event.version):
            return
        if event.version == self.newest and event.changed:
            self._reload(stage.role.name)

    def _on_died(self, event: ev.Died) -> None:
        executor = self.executors[event.executor]
        executor.dead = True
        ordinals = executor.fall()
        if not executor.role.restartable or executor.incarnation >= self.schedule.max_restarts:
            self._end(ev.Abort(_why_stopped(executor, event.reason)), closed=f"stopped: {event.reason}")
            return
        if executor.role.unit == "batch":
            self._saving = False  # what it was writing is lost with it
            self._unseen_snapshots.clear()
            self._rewind(executor)
        else:
            self.evaluation.lost(executor)
            for ordinal in ordinals:
                self._return(ordinal, executor.position)
        executor.incarnation += 1
        executor.dead = False
        self._say(ev.Start(executor.name, executor.incarnation, version=self.training.saved))

    def _on_saved(self, event: ev.Saved) -> None:
        self._unseen_snapshots.add(event.version)
        self._count_snapshots()

    # What follows from the new state

    def _advance(self) -> None:
        if self.finished:
            return
        self.training.advance()
        while self.newest < self.training.visible:
            self._make_visible(self.newest + 1)
            self.training.advance()
        for position in range(len(self.pools) - 1, 0, -1):
            self._hand_out(position)
        self._admit()
        if self.newest == self.training.trained == self.schedule.updates:
            self._wind_up()

    def _wind_up(self) -> None:
        """All updates are made: save the policy, finish the last evaluation, end."""
        if not self._saving:
            self._saving = True
            self._say(ev.Save(self.schedule.updates))
        if self.training.saved == self.schedule.updates and self.evaluation.all_done:
            self._end(ev.Finish(), closed="finished")

    def _make_visible(self, version: int) -> None:
        self.newest = version
        self._write(ledger.Visible(version))
        if version > 0:
            self.places_used -= self.schedule.groups_per_update
            if not self._keeps_for_rewind:
                self._forget(version - 1)
        self._count_snapshots()
        self.evaluation.version_visible(version)
        for executor in self.executors.values():
            self._offer_weights(executor)

    def _admit(self) -> None:
        """Groups for the first role: those that a death returned, then evaluation, then new ones while places last."""
        pool, returned = self.pools[0], self._waiting[0]
        self._hand_out(0)
        for executor, ordinal in self.evaluation.assign(pool, self.newest):
            self._assign(executor, ordinal, weight=1)
        samples = self.schedule.samples_per_group
        while not returned and self.places_used < self.schedule.num_places and self._has_more:
            chosen = pool.least_busy(samples, self.newest)
            if chosen is None:
                return
            self.places_used += 1
            self._assign(chosen, self.next_ordinal, samples)
            self.next_ordinal += 1

    def _hand_out(self, position: int) -> None:
        waiting, pool = self._waiting[position], self.pools[position]
        while waiting:
            weight = 1 if is_evaluation(waiting[0]) else self.schedule.samples_per_group
            executor = pool.least_busy(weight, self.newest)
            if executor is None:
                return
            self._assign(executor, heapq.heappop(waiting), weight)

    def _assign(self, executor: Executor, ordinal: int, weight: int) -> None:
        executor.take(ordinal, weight)
        self.pools[executor.position].touch(executor)
        if executor.position == 0 and not is_evaluation(ordinal):
            self._write(ledger.Issued(ordinal, executor.name, executor.version))
        self._say(ev.RunGroup(executor.name, executor.incarnation, ordinal))

    def _move_on(self, ordinal: int, position: int) -> None:
        if position < len(self.pools):
            heapq.heappush(self._waiting[position], ordinal)
        elif not is_evaluation(ordinal):
            for batch in self.window.settle(ordinal):
                self.training.add_batch(batch)
        elif not self.evaluation.owns(ordinal):
            self._say(ev.Forget((ordinal,)))
        elif finished := self.evaluation.settled(ordinal):
            self._say(ev.Evaluated(finished.version, finished.ordinals))
            self._say(ev.Forget(finished.ordinals))

    def _return(self, ordinal: int, position: int) -> None:
        """The holder died: the group waits for another executor of the same role."""
        if is_evaluation(ordinal) and not self.evaluation.owns(ordinal):
            self._say(ev.Forget((ordinal,)))
        else:
            heapq.heappush(self._waiting[position], ordinal)

    def _make_available(self, executor: Executor) -> None:
        self._offer_weights(executor)
        self.pools[executor.position].touch(executor)

    def _offer_weights(self, executor: Executor) -> None:
        """An executor with older weights takes the newest, in flight, unless it is answering an evaluation."""
        if not executor.reads_weights or not executor.up or executor.loading is not None:
            return
        if executor.version != self.newest and self.newest >= 0 and not self.evaluation.pins(executor):
            executor.loading = self.newest
            self._say(ev.Load(executor.name, executor.incarnation, self.newest))

    # Training's edges

    def _record_trained(self, update: int) -> None:
        ordinals = self.training.batches[update]
        self._write(ledger.Trained(update, tuple(o for o in ordinals if o not in self._dropped)))
        self._say(ev.Sync())

    def _count_snapshots(self) -> None:
        """A snapshot counts once its version is visible: who comes back from it has nothing older left to publish."""
        seen = {version for version in self._unseen_snapshots if version <= self.newest}
        self._unseen_snapshots -= seen
        covered = range(self.training.saved, max(seen, default=0))
        self.training.saved = max(self.training.saved, covered.stop)
        if self._keeps_for_rewind:
            for update in covered:
                self._forget(update)

    def _rewind(self, executor: Executor) -> None:
        trained = self.training.trained
        self.training.rewind(self.training.stage_of(executor))
        if self.training.trained < trained:
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

    # Small things

    @property
    def _has_more(self) -> bool:
        return self.next_ordinal < self.schedule.num_groups

    def _is_outdated(self, event: ev.AnyEvent) -> bool:
        return isinstance(event, ev.FromExecutor) and event.incarnation != self.executors[event.executor].incarnation

    def _holder(self, event: ev.GroupDone | ev.GroupFailed) -> Executor | None:
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


def _why_stopped(executor: Executor, reason: str) -> str:
    if not executor.role.restartable:
        return f"{executor.name} died: {reason}; a {role_of(executor.name)} cannot be restarted without snapshots"
    return f"{executor.name} died {executor.incarnation + 1} times, the last time: {reason}"
