"""The controller: `handle(event) -> commands`. It admits prompts, moves groups down the line and decides when weights change.

The rules, in the words of docs/flow.md:
- The job has (S+1)*P places. A group takes one when it is admitted; its batch frees P when the version that the batch made
  is visible, not when it was trained. This bounds staleness, and no stale data is thrown away.
- A group goes to the replica with the fewest groups among those that hold the newest visible version and have room.
- A batch is P ordinals, consecutive or (window) nearly so. Dropped groups keep their ordinal's place in it, empty. A group
  that is replaced is in no batch: it gives its place to one more group at the end (replacements.py).
- Death: the groups that the executor held are handed out again under the same ordinals; a role that trains is rewound.
- An executor that joins is one more replica; one that leaves gives its groups back, and nobody waits for it.
- With agents, the first role holds groups whose agents make calls; `calls.py` says which replica answers which call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from llamarl.config import EvaluateConfig, ScheduleConfig, SnapshotsConfig
from llamarl.controller import events as ev
from llamarl.controller import ledger
from llamarl.controller.calls import Calls
from llamarl.controller.evaluation import Evaluation
from llamarl.controller.groups import GroupSpec
from llamarl.controller.line import Line, role_of
from llamarl.controller.pool import ExecutorPool, ExecutorState
from llamarl.controller.probe import Probes
from llamarl.controller.replacements import Replacements
from llamarl.controller.snapshot_schedule import SnapshotSchedule
from llamarl.controller.training import Training
from llamarl.controller.version_policy import ExactVersion, NewestVersion, VersionPolicy
from llamarl.controller.window import Window
from llamarl.types import GroupFacts

MAX_FAILED_LOADS = 3
NO_SNAPSHOTS = SnapshotsConfig(every=0)


class Controller:
    def __init__(
        self, line: Line, schedule: ScheduleConfig, evaluate: EvaluateConfig, snapshots: SnapshotsConfig = NO_SNAPSHOTS
    ) -> None:
        self.line, self.schedule = line, schedule
        self.pools = [
            ExecutorPool(role, at, role.name in line.weights_source) for at, role in enumerate(line.group_roles)
        ]
        call_role = line.call_role
        reads = call_role is not None and call_role.name in line.weights_source
        self.calls = Calls(ExecutorPool(call_role, len(self.pools), reads)) if call_role else None
        self._staff = [*self.pools, *([self.calls.pool] if self.calls else [])]  # by the position of their executors
        self.sampling_pool = self.calls.pool if self.calls else self.pools[0]  # the replicas of the policy
        self._policy: VersionPolicy = ExactVersion(schedule) if schedule.deterministic else NewestVersion()
        self.probes = Probes(schedule, agents=line.call_role is not None)
        self.snapshots = SnapshotSchedule(snapshots, self._policy)
        self.training = Training(line, schedule.updates, self.snapshots, self.probes, self._say)
        self.replacements = Replacements(schedule)
        self.window = Window(schedule.groups_per_update, schedule.window, self._replace)
        self.evaluation = Evaluation(evaluate, schedule.updates)
        self.executors: dict[str, ExecutorState] = {
            executor.name: executor
            for executor in [one for pool in self._staff for one in pool.executors]
            + [stage.executor for stage in self.training.stages]
        }
        self.next_ordinal = 0
        self.places_used = 0
        self.newest = -1  # the newest visible version
        self.finished = False
        self.stopping = False
        self._resumed_at = 0  # the version that this run began with
        self._recovered: set[int] = set()  # groups that were settled before this run began, and are not admitted yet
        self._attempts: dict[int, int] = {}  # ordinal -> number of executors that died holding the group
        self._idle_target = -1  # the version that idle executors were last asked to hold
        # Per position, a heap of (priority, ordinal, group): groups that need an executor, in the order they get one.
        self._waiting: list[list[tuple[int, int, GroupSpec]]] = [[] for _ in self._staff]
        self._dropped: set[int] = set()
        self._commands: list[ev.AnyCommand] = []
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Began: self._on_began,
            ev.Started: self._on_started,
            ev.Loaded: self._on_loaded,
            ev.LoadFailed: self._on_load_failed,
            ev.GroupDone: self._on_group_done,
            ev.GroupFailed: self._on_group_failed,
            ev.CallMade: self._on_call_made,
            ev.CallEnded: lambda event: self._cancel(event.call),
            ev.GaveUp: lambda event: self._end(ev.Abort(event.reason), closed=f"stopped: {event.reason}"),
            ev.BatchDone: self._on_batch_done,
            ev.Published: self._on_published,
            ev.Died: self._on_died,
            ev.Joined: self._on_joined,
            ev.Left: self._on_left,
            ev.Saved: self._on_saved,
            ev.Committed: self._on_committed,
            ev.SaveFailed: self._on_save_failed,
            ev.Resumed: self._on_resumed,
            ev.StopRequested: self._on_stop_requested,
        }

    def handle(self, event: ev.AnyEvent) -> list[ev.AnyCommand]:
        """The whole interface. Events of earlier incarnations, duplicates and anything after the end are ignored."""
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
        """Batches that were made before are made again, the same and in the same order. Everything else is admitted anew, in
        order and as places allow, so that the bound holds; settled groups are not generated again."""
        self._resumed_at = event.version
        self.snapshots.resume(event.version)
        self.training.resume(event.version)
        self.evaluation.resume(event.evaluated)
        self._dropped = set(event.dropped)
        self._recovered = set(event.settled)
        for batch in event.batches:
            self.training.add_batch(batch)
            self.places_used += len(batch)
        self.replacements.resume(event.replaced, event.same_rewards)
        self.window.resume(event.oldest, event.taken, event.version + len(event.batches))
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
        if event.version == self._target(executor):  # otherwise a newer version took its slot, which is no failure
            executor.failed_loads += 1
        if executor.failed_loads == MAX_FAILED_LOADS and executor.joined:
            self._dismiss(executor, event.reason)
        elif executor.failed_loads == MAX_FAILED_LOADS:
            self._end(ev.Abort(f"{executor.name}: {event.reason}"), closed=f"stopped: {event.reason}")
        else:
            self._make_available(executor)

    def _on_group_done(self, event: ev.GroupDone) -> None:
        executor = self.executors[event.executor]
        if (group := executor.groups.get(event.ordinal)) is None:
            return  # a duplicate
        if group.kind == "call":
            self._end_call(executor, group.ordinal)
            return
        executor.release(group)
        self._end_agents(executor, group.ordinal)
        if group.kind == "train":
            self._write(_passed(group.ordinal, executor.role.done, event.facts))
            self.replacements.note(group.ordinal, event.facts)
        elif group.kind == "evaluation":
            self._pass_evaluation(group.ordinal)
        self._make_available(executor)
        self._move_on(group, executor.position + 1)

    def _on_group_failed(self, event: ev.GroupFailed) -> None:
        executor = self.executors[event.executor]
        if (group := executor.groups.get(event.ordinal)) is None:
            return  # a duplicate
        if group.kind == "call":
            self._end_call(executor, group.ordinal)
            return
        executor.release(group)
        self._end_agents(executor, group.ordinal)
        if group.kind == "train":
            self._drop(group.ordinal, event.reason)
        elif group.kind == "evaluation":
            self._pass_evaluation(group.ordinal)
            self._settle_evaluation(group.ordinal)
        else:
            self._give_up_probe(group.ordinal)
        self._make_available(executor)

    def _on_call_made(self, event: ev.CallMade) -> None:
        caller = self.executors[event.executor]
        if self.calls is not None and event.ordinal in caller.groups:
            self.calls.make(event.call, caller.name, event.ordinal, event.num_completions)

    def _end_call(self, replica: ExecutorState, call: int) -> None:
        """The call is answered, or can never be; the driver has told its caller."""
        if self.calls is not None and call in self.calls:
            self.calls.end(call)
            self._say(ev.Forget((call,)))
        self._make_available(replica)

    def _cancel(self, call: int) -> None:
        """Nobody waits for the answer any more."""
        if self.calls is None or call not in self.calls:
            return
        if (replica := self.calls.end(call).replica) is not None:
            self._say(ev.CancelCall(replica.name, replica.incarnation, call))
            self._make_available(replica)
        self._say(ev.Forget((call,)))

    def _end_agents(self, executor: ExecutorState, ordinal: int) -> None:
        """The group leaves the first role: calls that its agents left behind are cancelled."""
        if self.calls is not None and executor.position == 0:
            self._cancel_all(ordinal)
            self.calls.leave(ordinal)

    def _cancel_all(self, ordinal: int) -> None:
        for call in self.calls.of_group(ordinal) if self.calls else ():
            self._cancel(call)

    def _return_call(self, call: int, reason: str) -> None:
        """The replica died: another one answers the call, unless the call seems to be the cause."""
        if self.calls is None or call not in self.calls:
            return
        attempts = self.calls.give_back(call, died=bool(reason))
        if attempts < self.schedule.max_attempts:
            return
        caller = self.executors[self.calls.end(call).caller]
        told = f"{attempts} replicas died while they answered it, the last one: {reason}"
        self._say(ev.RefuseCall(caller.name, caller.incarnation, call, told))
        self._say(ev.Forget((call,)))

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
        groups = executor.reset()
        executor.failures += 1
        worn_out = not executor.role.restartable or executor.failures > self.schedule.max_restarts
        if worn_out and not executor.joined:
            self._end(ev.Abort(_why_stopped(executor, event.reason)), closed=f"stopped: {event.reason}")
            return
        if executor.role.unit == "batch":
            self._rewind(executor)
        else:
            self.evaluation.lost(executor)
            for group in groups:
                self._return(group, executor.position, event.reason)
        if worn_out:
            self._dismiss(executor, _why_stopped(executor, event.reason))
            return
        executor.incarnation += 1
        self._say(ev.Start(executor.name, executor.incarnation, version=self.snapshots.saved))

    def _on_joined(self, event: ev.Joined) -> None:
        executor = self.executors.get(event.executor)
        if executor is None:
            position = [pool.role.name for pool in self._staff].index(role_of(event.executor))
            executor = self.executors[event.executor] = self._staff[position].add(event.executor, position)
        elif not executor.away:
            return  # a duplicate
        executor.away = False
        self._say(ev.Start(executor.name, executor.incarnation, version=self.snapshots.saved))

    def _on_left(self, event: ev.Left) -> None:
        executor = self.executors.get(event.executor)
        if executor is not None and executor.joined and not executor.away:
            self._part_with(executor)

    def _dismiss(self, executor: ExecutorState, reason: str) -> None:
        self._say(ev.Dismiss(executor.name, executor.incarnation, reason))
        self._part_with(executor)

    def _part_with(self, executor: ExecutorState) -> None:
        """The executor is gone for now, perhaps for good. Its groups go to others; none of them is to blame."""
        self.evaluation.lost(executor)
        for group in executor.reset():
            self._wait_again(group, executor.position)
        executor.away, executor.failures = True, 0
        executor.incarnation += 1

    def _on_saved(self, event: ev.Saved) -> None:
        self.snapshots.part_saved(role_of(event.executor), event.version)

    def _on_committed(self, event: ev.Committed) -> None:
        if self.snapshots.committed(event.version):
            self._count_snapshots()

    def _on_save_failed(self, event: ev.SaveFailed) -> None:
        if self.snapshots.failed(event.version) and event.version == self.training.final_version:
            reason = f"the last snapshot could not be written: {event.reason}"
            self._end(ev.Abort(reason), closed=f"stopped: {reason}")

    def _on_stop_requested(self, event: ev.StopRequested) -> None:
        if not self.stopping:
            self.stopping = True
            self.training.stop_early()

    # Consequences of the new state

    def _advance(self) -> None:
        if self.finished:
            return
        self._advance_training()
        while self.newest < self.training.visible:
            # One by one, for evaluations; a resumed job begins with the version of its snapshot.
            self._make_visible(max(self.newest + 1, self._resumed_at))
            self._advance_training()
        for position in range(len(self._staff) - 1, 0, -1):
            self._hand_out(position)
        self._admit()
        self._route_calls()
        if self._idle_target != (target := self._find_idle_target()):
            self._idle_target = target
            for executor in self.sampling_pool.executors:
                self._offer_weights(executor)
        if self.training.trained == self.training.final_version:
            self._wind_up(self.training.final_version)

    def _wind_up(self, version: int) -> None:
        """No update follows: take the last snapshot, finish the last evaluation, end."""
        if self.snapshots.lacks(version, stopping=self.stopping):
            self.training.save_last(version)
            self._advance_training()
        elif self.stopping:
            self._end(ev.Finish(stopped=True), closed=f"stopped on request after update {version}")
        elif self.newest == version and self.evaluation.all_done:
            self._end(ev.Finish(), closed=ledger.FINISHED)

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
        """Hand groups to the first role: those that a death returned, then evaluation, then new ones while places last."""
        pool, returned = self.pools[0], self._waiting[0]
        self._issue_probe()
        self._hand_out(0)
        agents = pool if self.calls else None
        for executor, group in self.evaluation.assign(self.sampling_pool, self.newest, self._policy, agents):
            self._assign(executor, group)
        if self.newest < 0 and self.calls:
            return  # agents hold no weights themselves, so they could begin before there are any
        while self.may_admit:
            group = self._train_group(self.next_ordinal)
            if returned and returned[0][0] <= group.priority:
                return
            if self._skip_known():
                continue
            chosen = pool.least_busy(group.num_completions, self._version_for(group))
            if chosen is None:
                return
            self.places_used += 1
            self._assign(chosen, group)
            self.next_ordinal += 1

    def _issue_probe(self) -> None:
        version = self.training.to_be_probed
        if version is not None and version == self.newest and (ordinal := self.probes.issue(version)) is not None:
            position = self._staff.index(self.sampling_pool)
            pinned = self._policy.pin(version)
            self._wait(position, GroupSpec(ordinal, "probe", self.schedule.samples_per_group, pinned))
            if position:
                self._hand_out(position)

    def _train_group(self, ordinal: int) -> GroupSpec:
        version = self._policy.pin(self.replacements.sampling_version(ordinal))
        return GroupSpec(ordinal, "train", self.schedule.samples_per_group, version)

    def _skip_known(self) -> bool:
        """After a resume, the next ordinal may be in a batch already, or settled: then it only needs its place."""
        ordinal = self.next_ordinal
        if self.window.is_taken(ordinal):
            self.next_ordinal += 1
            return True
        if ordinal in self._recovered:
            self._recovered.remove(ordinal)
            self.next_ordinal += 1
            self.places_used += 1
            self._settle(ordinal)
            self._advance_training()
            return True
        return False

    def _hand_out(self, position: int) -> None:
        waiting, pool = self._waiting[position], self._staff[position]
        while waiting:
            group = waiting[0][2]
            executor = pool.least_busy(group.num_completions, self._version_for(group))
            if executor is None:
                return
            heapq.heappop(waiting)
            self._assign(executor, group)

    def _route_calls(self) -> None:
        for replica, call in self.calls.assign(self.evaluation.replica_of) if self.calls else ():
            self._assign(replica, call)

    def _wait(self, position: int, group: GroupSpec) -> None:
        heapq.heappush(self._waiting[position], (group.priority, group.ordinal, group))

    def _assign(self, executor: ExecutorState, group: GroupSpec) -> None:
        executor.assign(group)
        self._staff[executor.position].touch(executor)
        version = executor.version
        if executor.position == 0 and self.calls:
            version = self.calls.admit(group.ordinal, self.newest)
        if executor.position == 0 and group.kind == "train":
            self._write(ledger.Issued(group.ordinal, executor.name, version))
        self._say(ev.RunGroup(executor.name, executor.incarnation, group.ordinal, group.kind))

    def _move_on(self, group: GroupSpec, position: int) -> None:
        """The group goes to the role at `position`. A probe ends behind the first role, other groups behind the last."""
        if group.kind == "probe":
            self.probes.answered(group.ordinal)
        elif position < len(self.pools):
            self._wait(position, group)
        elif group.kind == "train":
            self._settle(group.ordinal)
        else:
            self._settle_evaluation(group.ordinal)

    def _settle(self, ordinal: int) -> None:
        for batch in self.window.settle(ordinal):
            self.training.add_batch(batch)

    def _pass_evaluation(self, ordinal: int) -> None:
        if (replica := self.evaluation.passed(ordinal)) is not None and self.calls:
            self._offer_weights(replica)  # otherwise it is the one that has just reported, and is offered them anyway

    def _replace(self, ordinal: int, update: int) -> bool:
        """Whether another group takes the place of this one in the batch of `update`. If so, its place is free at once."""
        if not self.replacements.replace(ordinal, update):
            return False
        self.places_used -= 1
        self._attempts.pop(ordinal, None)
        self._write(ledger.Replaced(ordinal, update))
        self._say(ev.Forget((ordinal,)))
        return True

    def _settle_evaluation(self, ordinal: int) -> None:
        if not self.evaluation.owns(ordinal):
            self._say(ev.Forget((ordinal,)))
        elif finished := self.evaluation.settled(ordinal):
            self._say(ev.Evaluated(finished.version, finished.ordinals))
            self._say(ev.Forget(finished.ordinals))

    def _drop(self, ordinal: int, reason: str) -> None:
        if self.calls:
            self.calls.leave(ordinal)
        self._dropped.add(ordinal)
        self._write(ledger.Dropped(ordinal, reason))
        self._settle(ordinal)

    def _give_up(self, ordinal: int, reason: str) -> None:
        """Drop the group. In deterministic mode timing must not choose what is trained, so the job stops instead."""
        if self.schedule.deterministic:
            self._end(ev.Abort(f"group {ordinal}: {reason}"), closed=f"stopped: group {ordinal}: {reason}")
        else:
            self._drop(ordinal, reason)

    def _return(self, group: GroupSpec, position: int, reason: str) -> None:
        """The holder died: the group waits for another executor of the same role, unless it seems to be the cause."""
        if group.kind == "call":
            self._return_call(group.ordinal, reason)
            return
        self._cancel_all(group.ordinal)
        self._attempts[group.ordinal] = attempts = self._attempts.get(group.ordinal, 0) + 1
        worn_out = attempts >= self.schedule.max_attempts
        if group.kind == "probe" and worn_out:
            self._give_up_probe(group.ordinal)
        elif group.kind == "train" and worn_out:
            self._give_up(group.ordinal, f"its executor died {attempts} times, the last time: {reason}")
        else:
            self._wait_again(group, position)

    def _wait_again(self, group: GroupSpec, position: int) -> None:
        if group.kind == "call":
            self._return_call(group.ordinal, "")
            return
        self._cancel_all(group.ordinal)
        if group.kind == "evaluation" and not self.evaluation.owns(group.ordinal):
            self._say(ev.Forget((group.ordinal,)))
        else:
            self._wait(position, group)

    def _make_available(self, executor: ExecutorState) -> None:
        self._offer_weights(executor)
        self._staff[executor.position].touch(executor)

    def _offer_weights(self, executor: ExecutorState) -> None:
        """The executor loads the weights that it should hold, unless it is answering an evaluation."""
        if not executor.reads_weights or not executor.up or executor.loading is not None:
            return
        version = self._target(executor)
        if executor.version != version >= 0 and not self.evaluation.pins(executor):
            executor.loading = version
            self._say(ev.Load(executor.name, executor.incarnation, version))

    # Which version samples what

    def _version_for(self, group: GroupSpec) -> int:
        return self.newest if group.version is None else group.version

    def _target(self, executor: ExecutorState) -> int:
        return self._policy.target(executor, self._find_idle_target())

    def _find_idle_target(self) -> int:
        return self._policy.idle_target(self.newest, self._unassigned_versions())

    def _unassigned_versions(self) -> Iterator[int]:
        """The versions due for groups that no replica was given yet: the oldest of each kind."""
        for priority, _, _ in self._waiting[0][:1]:
            yield priority
        if (version := self.evaluation.oldest_unassigned) is not None:
            yield version
        if self.may_admit:
            yield self.replacements.sampling_version(self.next_ordinal)

    def _ungenerated_versions(self) -> Iterator[int]:
        """The versions due for groups that are not generated yet: the oldest of each kind. All groups that a replica holds
        are due to the same version."""
        for executor in self.pools[0].executors:
            for group in islice(executor.groups.values(), 1):
                yield group.priority
        for priority, _, _ in self._waiting[0][:1]:
            yield priority
        if self.next_ordinal < self.schedule.num_groups + self.replacements.total:
            yield self.replacements.sampling_version(self.next_ordinal)
        if (version := self.evaluation.oldest_ungenerated) is not None:
            yield version

    # Training's edges

    def _advance_training(self) -> None:
        self.training.advance(self._policy.oldest_needed(self._ungenerated_versions()))

    def _record_trained(self, update: int) -> None:
        ordinals = self.training.batches[update]
        dropped = tuple(ordinal for ordinal in ordinals if ordinal in self._dropped)
        self._write(ledger.Trained(update, tuple(o for o in ordinals if o not in dropped), dropped))
        self._say(ev.Sync())

    def _count_snapshots(self) -> None:
        """Groups and probes that a counting snapshot covers are not needed any more."""
        covered = self.snapshots.count(self.newest)
        if covered:
            self._say(ev.Prune(covered.stop))
            if measured := self.probes.covered(covered.stop):
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
            self.snapshots.forget_unseen()
            self._write(ledger.Rewound(self.training.trained, executor.name))

    def _reload(self, publisher: str) -> None:
        """A version that was made again has other bytes: every executor that holds it loads it again."""
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

    # Details

    @property
    def may_admit(self) -> bool:
        """The next group exists, there is a place for it, and it will be needed."""
        end = self._policy.last_ordinal(self.training.final_version) if self.stopping else self.schedule.num_groups
        return self.next_ordinal < end + self.replacements.total and self.places_used < self.schedule.num_places

    def _is_void(self, event: ev.AnyEvent) -> bool:
        """Whether the event is of a dead incarnation, or one that this role cannot cause."""
        if not isinstance(event, ev.ExecutorEvent):
            return False
        executor = self.executors[event.executor]
        of_training = isinstance(event, ev.BatchDone | ev.Published | ev.Saved)
        return event.incarnation != executor.incarnation or (of_training and executor.role.unit != "batch")

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
