"""Carries out the controller's commands on an engine, and feeds it the events. The driver takes no decision."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from llamarl import messages as msg
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.ledger import FINISHED, Dropped, Replaced, Rewound, Trained
from llamarl.controller.line import role_of
from llamarl.controller.replacements import replacement_metrics
from llamarl.controller.replay import setting_of
from llamarl.engine.call_table import Asked, CallTable
from llamarl.engine.curriculum_log import OutcomeLog
from llamarl.engine.engine import Arrival, Death, Engine, EngineEvent, ExecutorJoined, ExecutorLeft
from llamarl.engine.group_store import GroupStore
from llamarl.engine.kept_rollouts import KeptRollouts
from llamarl.engine.prompts import Prompts
from llamarl.engine.snapshot_store import SnapshotStore
from llamarl.errors import JobFailed
from llamarl.failpoints import failpoint
from llamarl.observe.callbacks import CallbackRunner
from llamarl.observe.run_folder import RunFolder, log_file
from llamarl.observe.summary import STOPPED
from llamarl.observe.watcher import Watcher
from llamarl.types import CompletionGroup, RolloutGroup, facts_of


class Driver:
    def __init__(
        self,
        controller: Controller,
        engine: Engine,
        prompts: Prompts,
        *,
        store: GroupStore,
        snapshots: SnapshotStore,
        run_folder: RunFolder,
        watcher: Watcher,
        drop_reasons: Mapping[int, str],
        callbacks: CallbackRunner,
        outcomes: OutcomeLog,
        cut_off_penalty: float = 0.0,
    ) -> None:
        self._outcomes = outcomes
        self._cut_off_penalty = cut_off_penalty
        self._controller, self._engine, self._prompts = controller, engine, prompts
        self._folder, self._watcher = run_folder, watcher
        self._store, self._snapshots = store, snapshots
        self._rollouts = KeptRollouts(run_folder.rollouts, store, prompts, reasons=drop_reasons, note=watcher.note)
        self._callbacks = callbacks
        self._calls = CallTable(run_folder.run)
        self._events: deque[ev.AnyEvent] = deque()
        self._adapters: dict[int, set[str]] = {}  # hashes of the adapters that were published, by version
        self._stop_requested = ""  # the outcome to record; empty: no stop was requested
        self.outcome = FINISHED
        self._interrupted = False
        self._ended = False
        self._actions: dict[type[ev.Command], Callable[[Any], None]] = {
            ev.Start: self._start,
            ev.Dismiss: self._dismiss,
            ev.Load: lambda c: engine.send(c.executor, msg.LoadWeights(c.version)),
            ev.RunGroup: self._run_group,
            ev.CancelCall: lambda c: engine.send(c.executor, msg.DropCall(c.call)),
            ev.RefuseCall: self._refuse_call,
            ev.RunBatch: self._run_batch,
            ev.Publish: lambda c: engine.send(c.executor, msg.PublishWeights(c.version)),
            ev.Save: self._save,
            ev.Write: self._write,
            ev.Commit: self._commit,
            ev.Prune: self._prune,
            ev.Sync: self._sync,
            ev.Forget: self._forget,
            ev.Evaluated: self._evaluated,
            ev.Finish: self._finish,
            ev.Abort: self._abort,
        }

    def run(self, begin: ev.Began | ev.Resumed) -> None:
        """Run the job until the controller finishes it; JobFailed if it aborts."""
        self._watcher.begin()
        self._folder.events.append_json(setting_of(self._controller))
        self._callbacks.start()
        self._tell(begin)
        self._note_if_nobody_generates()
        while not self._ended:
            for arrival in self._engine.events():
                self._tell(self._event_of(arrival))
                if isinstance(arrival, ExecutorLeft):
                    self._note_if_nobody_generates()
            if self._interrupted:
                raise KeyboardInterrupt
            if self._callbacks.stop_requested:
                self._callbacks.stop_requested = False
                self.request_stop()
            if self._stop_requested:
                self.outcome, self._stop_requested = self._stop_requested, ""
                self._watcher.note(f"{self.outcome}: the update under way is finished, then a snapshot is made")
                self._tell(ev.StopRequested())

    def request_stop(self, outcome: str = STOPPED) -> None:
        """End with a snapshot and record `outcome`. Safe in a signal handler: the loop does the work."""
        self._stop_requested = outcome

    def interrupt(self) -> None:
        """End at once, as a kill would. Safe in a signal handler."""
        self._interrupted = True

    def _tell(self, event: ev.AnyEvent | None) -> None:
        """Carry out commands in order. Events that they cause at once follow after them."""
        if event is not None:
            self._events.append(event)
        while self._events and not self._ended:
            event = self._events.popleft()
            failpoint("driver.event")
            self._folder.events.append_json(event)
            for command in self._controller.handle(event):
                failpoint("driver.command")
                self._actions[type(command)](command)

    # Reports become events

    def _event_of(self, arrival: EngineEvent) -> ev.AnyEvent | None:
        if isinstance(arrival, ExecutorJoined):
            self._watcher.joined(arrival.executor, arrival.host)
            return ev.Joined(arrival.executor, arrival.host)
        if isinstance(arrival, ExecutorLeft):
            self._watcher.left(arrival.executor, arrival.host, arrival.reason)
            return ev.Left(arrival.executor, arrival.reason)
        who = (arrival.executor, arrival.incarnation)
        if arrival.incarnation != self._controller.executors[arrival.executor].incarnation:
            return None  # a late report of a dead process
        if isinstance(arrival, Death):
            self._watcher.died(arrival.executor, arrival.reason)
            return ev.Died(*who, arrival.reason)
        self._watcher.spent(arrival.executor, arrival.spans, arrival.rank)
        if arrival.memory is not None:
            self._watcher.held(arrival.executor, arrival.memory)
        report = arrival.report
        match report:
            case None | msg.ReaderStuck():
                return None
            case msg.Up():
                return ev.Started(*who)
            case msg.WeightsLoaded():
                if report.adapters and report.adapters not in self._adapters.get(report.version, ()):
                    return ev.GaveUp(*who, self._other_adapters(arrival.executor, report))
                self._watcher.loaded(arrival.executor, report.version, report.num_bytes, report.lost_s)
                return ev.Loaded(*who, report.version)
            case msg.WeightsNotLoaded():
                return ev.LoadFailed(*who, report.version, report.reason)
            case msg.GroupResult():
                return self._group_result(arrival, report)
            case msg.GroupRefused():
                self._refuse(report.ordinal, report.reason)
                return ev.GroupFailed(*who, report.ordinal, report.reason)
            case msg.CallRequested():
                return self._call_made(arrival, report)
            case msg.CallDropped():
                call = self._calls.call_of(Asked(*who, report.number))
                return None if call is None else ev.CallEnded(*who, call)
            case msg.AgentsCounted():
                self._watcher.agents_counted(report)
                return None
            case msg.ScoresFailed():
                self._watcher.scores_failed(report.failures, report.timeouts)
                return None
            case msg.ToolsFailed():
                self._watcher.tools_failed(report.failures, report.timeouts)
                return None
            case msg.DecodingCounted():
                self._watcher.decoding_counted(report)
                return None
            case msg.Noted():
                self._watcher.note(f"{arrival.executor}: {report.text}{self._log_of(arrival.executor)}")
                return None
            case msg.MustStop():
                return ev.GaveUp(*who, f"{arrival.executor}: {report.reason}{self._log_of(arrival.executor)}")
            case msg.BatchResult():
                return self._batch_result(arrival, report)
            case msg.WeightsPublished():
                if report.adapters:
                    self._adapters.setdefault(report.version, set()).add(report.adapters)
                self._watcher.published(arrival.executor, report.version, report.num_bytes, report.lost_s)
                return ev.Published(*who, report.version, report.changed)
            case msg.StateSaved():
                self._snapshots.add_part(report.version, report.files)
                return ev.Saved(*who, report.version)
            case msg.StateNotSaved():
                # An attempt that was given up may fail later, when another is under way.
                current = self._snapshots.is_collecting(report.version)
                return self._save_failed(report.version, report.reason) if current else None
            case msg.Failed():
                return ev.Died(*who, report.reason)

    def _other_adapters(self, executor: str, report: msg.WeightsLoaded) -> str:
        return (
            f"model.lora: {executor} applies other adapters than the trainer published as version {report.version} "
            f"(hash {report.adapters}, published {', '.join(self._adapters.get(report.version, ['none']))})"
        )

    def _log_of(self, executor: str) -> str:
        """Names the executor's log, if it has any content."""
        log = log_file(self._folder.path, executor)
        return f"; see {log}" if log.is_file() and log.stat().st_size else ""

    def _group_result(self, arrival: Arrival, report: msg.GroupResult) -> ev.AnyEvent:
        group = report.group
        facts = facts_of(group, self._cut_off_penalty)
        if isinstance(group, CompletionGroup) and group.kind == "call":
            self._answer(arrival.executor, group)
        elif group.ordinal in self._controller.executors[arrival.executor].groups:
            last = self._controller.line.group_roles[-1].name
            self._store.put(group, passing=role_of(arrival.executor) != last)
            if group.kind == "train":
                from_data = isinstance(group, CompletionGroup | RolloutGroup) and group.prompt.written is not None
                self._watcher.group_done(arrival.executor, replace(facts, num_tokens=0) if from_data else facts)
                if role_of(arrival.executor) == last:
                    self._outcomes.hear(group.ordinal, facts)
        return ev.GroupDone(arrival.executor, arrival.incarnation, group.ordinal, facts)

    def _call_made(self, arrival: Arrival, report: msg.CallRequested) -> ev.AnyEvent | None:
        """A call of a group that its executor still holds; the agents of any other group are ending."""
        if report.ordinal not in self._controller.executors[arrival.executor].groups:
            return None
        call = self._calls.add(Asked(arrival.executor, arrival.incarnation, report.number), report)
        self._store.put(call)
        return ev.CallMade(arrival.executor, arrival.incarnation, call.ordinal, report.ordinal, report.sampling.samples)

    def _answer(self, executor: str, group: CompletionGroup) -> None:
        """Pass the answer to a call on to whoever asked. A replica that has lost the call is not heard."""
        asked = self._calls.asked(group.ordinal)
        if asked is not None and group.ordinal in self._controller.executors[executor].groups:
            self._engine.send(asked.executor, msg.CallAnswered(asked.number, group.completions))

    def _refuse_call(self, command: ev.RefuseCall) -> None:
        self._refuse(command.call, command.reason)

    def _refuse(self, call: int, reason: str) -> None:
        """Tell whoever asked that the call cannot be answered; nothing happens for a group."""
        if (asked := self._calls.asked(call)) is not None:
            self._engine.send(asked.executor, msg.CallRefused(asked.number, reason))

    def _batch_result(self, arrival: Arrival, report: msg.BatchResult) -> ev.AnyEvent:
        skipped = bool(report.metrics.get("skipped"))
        self._store.amend(report.groups)
        self._rollouts.add_logprobs(report.update, report.logprobs)
        metrics = report.metrics
        if role_of(arrival.executor) == self._controller.line.batch_roles[-1].name:
            ordinals = self._controller.training.batches[report.update]
            metrics = {**metrics, **replacement_metrics(self._controller.replacements, report.update, metrics)}
            metrics = {**metrics, **self._outcomes.metrics(ordinals)}
            self._callbacks.hear(report.update, metrics, report.timings)
        self._watcher.batch_done(arrival.executor, report.update, metrics, report.timings)
        if skipped:
            self._watcher.skipped(arrival.executor, report.update, self._controller.training.batches[report.update])
        return ev.BatchDone(arrival.executor, arrival.incarnation, report.update, skipped)

    # Commands become messages

    def _start(self, command: ev.Start) -> None:
        if command.incarnation:
            self._watcher.restarted(command.executor)
        snapshot = self._snapshots.path(command.version) if command.version else None
        self._engine.spawn(command.executor, command.incarnation, snapshot)

    def _dismiss(self, command: ev.Dismiss) -> None:
        self._engine.dismiss(command.executor, f"{command.reason}{self._log_of(command.executor)}")

    def _note_if_nobody_generates(self) -> None:
        pool = self._controller.sampling_pool
        if all(executor.away for executor in pool.executors):
            self._watcher.note(f"no {pool.role.name} is there: the job waits until a host joins (engine.join)")

    def _run_group(self, command: ev.RunGroup) -> None:
        if command.ordinal not in self._store:
            self._store.put(self._prompts.group(command.ordinal, command.kind))
        self._engine.send(command.executor, msg.WorkOnGroup(self._store.get(command.ordinal)))

    def _run_batch(self, command: ev.RunBatch) -> None:
        rollouts = self._store.rollouts(command.ordinals)
        probe = None if command.probe is None else self._store.completion(command.probe)
        if role_of(command.executor) == self._controller.line.batch_roles[-1].name:
            self._watcher.training(command.update, rollouts)
        wanted = self._rollouts.wanted(command.ordinals)
        folder = str(self._folder.batch(command.update))
        self._engine.send(command.executor, msg.WorkOnBatch(command.update, rollouts, probe, wanted, folder))

    def _save(self, command: ev.Save) -> None:
        try:
            folder = self._snapshots.begin(command.version)
        except OSError as error:
            self._events.append(self._save_failed(command.version, str(error)))
            return
        self._engine.send(command.executor, msg.SaveState(command.version, str(folder)))

    def _commit(self, command: ev.Commit) -> None:
        try:
            self._store.sync()  # a job that resumes from here needs all groups and rows before it
            self._outcomes.sync()
            self._folder.sync()
            self._folder.metrics.sync()
            self._folder.evaluations.sync()
            self._folder.rollouts.sync()
            self._snapshots.commit(command.version)
        except OSError as error:
            self._events.append(self._save_failed(command.version, str(error)))
            return
        self._watcher.saved(command.version)
        self._events.append(ev.Committed(command.version))

    def _prune(self, command: ev.Prune) -> None:
        """Records that snapshots cover are folded. If that fails now, it is done with the next snapshot."""
        with suppress(OSError):
            self._snapshots.prune(command.version)
            self._folder.ledger.fold(min(self._snapshots.versions(), default=0))

    def _save_failed(self, version: int, reason: str) -> ev.SaveFailed:
        """The disk may be full: files of the attempt are removed at once, since the ledger needs the room."""
        self._snapshots.give_up()
        self._watcher.note(f"NOTE: SNAPSHOT {version} COULD NOT BE WRITTEN: {reason}; the one before stays")
        return ev.SaveFailed(version, reason)

    def _sync(self, command: ev.Sync) -> None:
        self._store.sync()
        self._outcomes.sync()
        self._folder.sync()
        self._callbacks.deliver()

    def _write(self, command: ev.Write) -> None:
        if isinstance(command.record, Dropped):
            self._outcomes.hear(command.record.ordinal, None)
            self._rollouts.drop(command.record.ordinal, command.record.reason)
            self._store.drop(command.record.ordinal)
            self._watcher.dropped(command.record.ordinal, command.record.reason)
        elif isinstance(command.record, Replaced):
            self._watcher.replaced()
        elif isinstance(command.record, Rewound):
            self._snapshots.rewind(command.record.to_update)
            self._folder.metrics.rewind(command.record.to_update, role_of(command.record.executor))
            self._rollouts.rewind(command.record.to_update)
        elif isinstance(command.record, Trained):
            self._rollouts.write(command.record)
            self._folder.drop_batch(command.record.update)
            self._callbacks.count(command.record.update)
        self._folder.ledger.append(command.record)

    def _forget(self, command: ev.Forget) -> None:
        self._rollouts.forget(command.ordinals)
        for ordinal in command.ordinals:
            self._store.drop(ordinal)
            self._calls.forget(ordinal)

    def _evaluated(self, command: ev.Evaluated) -> None:
        groups = self._store.rollouts(command.ordinals)
        rewards = [reward for group in groups for reward in group.rewards]
        score = sum(rewards) / len(command.ordinals)
        self._watcher.evaluated(command.version, score, len(command.ordinals), groups)
        self._callbacks.evaluated(command.version, score)

    def _finish(self, command: ev.Finish) -> None:
        self._ended = True
        if not command.stopped:
            self.outcome = FINISHED

    def _abort(self, command: ev.Abort) -> None:
        raise JobFailed(command.reason)
