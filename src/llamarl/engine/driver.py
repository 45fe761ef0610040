"""Carries out the controller's commands on an engine, and tells it what happened. No decision is taken here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamarl import messages as msg
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.evaluation import is_evaluation
from llamarl.controller.ledger import Dropped, encode_line
from llamarl.engine.engine import Arrival, Death, Engine
from llamarl.engine.prompts import Prompts
from llamarl.engine.store import GroupStore
from llamarl.errors import JobFailed
from llamarl.observe.run_folder import RunFolder
from llamarl.observe.watcher import Watcher
from llamarl.types import facts_of


class Driver:
    def __init__(
        self, controller: Controller, engine: Engine, prompts: Prompts, run_folder: RunFolder, watcher: Watcher
    ) -> None:
        self._controller, self._engine, self._prompts = controller, engine, prompts
        self._folder, self._watcher = run_folder, watcher
        self._store = GroupStore()
        self._unsaved: set[str] = set()  # executors whose part of the snapshot under way is missing
        self._ended = False
        self._actions: dict[type[ev.Command], Callable[[Any], None]] = {
            ev.Start: self._start,
            ev.Load: lambda c: engine.send(c.executor, msg.LoadWeights(c.version)),
            ev.RunGroup: self._run_group,
            ev.RunBatch: self._run_batch,
            ev.Publish: lambda c: engine.send(c.executor, msg.PublishWeights(c.version)),
            ev.Save: self._save,
            ev.Write: self._write,
            ev.Sync: lambda c: run_folder.ledger.sync(),
            ev.Forget: self._forget,
            ev.Evaluated: self._evaluated,
            ev.Finish: self._finish,
            ev.Abort: self._abort,
        }

    def run(self) -> None:
        """The whole job: until the controller says Finish, or JobFailed."""
        self._tell(ev.Began())
        while not self._ended:
            for arrival in self._engine.events():
                self._tell(self._event_of(arrival))

    def _tell(self, event: ev.AnyEvent | None) -> None:
        if event is None:
            return
        self._folder.events.append_json(event)
        for command in self._controller.handle(event):
            self._actions[type(command)](command)

    # Reports become events

    def _event_of(self, arrival: Arrival | Death) -> ev.AnyEvent | None:
        who = (arrival.executor, arrival.incarnation)
        if arrival.incarnation != self._controller.executors[arrival.executor].incarnation:
            return None  # words of the dead
        if isinstance(arrival, Death):
            self._watcher.died(arrival.executor, arrival.reason)
            return ev.Died(*who, arrival.reason)
        self._watcher.spent(arrival.executor, arrival.spans)
        report = arrival.report
        match report:
            case None | msg.ReaderStuck():
                return None
            case msg.Up():
                return ev.Started(*who)
            case msg.WeightsLoaded():
                return ev.Loaded(*who, report.version)
            case msg.WeightsNotLoaded():
                return ev.LoadFailed(*who, report.version, report.reason)
            case msg.GroupResult():
                return self._group_result(arrival, report)
            case msg.GroupRefused():
                return ev.GroupFailed(*who, report.ordinal, report.reason)
            case msg.BatchResult():
                for group in report.groups:
                    self._store.put(group)
                self._watcher.batch_done(arrival.executor, report.update, report.metrics)
                return ev.BatchDone(*who, report.update)
            case msg.WeightsPublished():
                self._watcher.published(report.version, report.num_bytes)
                return ev.Published(*who, report.version, report.changed)
            case msg.PolicySaved():
                self._unsaved.discard(arrival.executor)
                return ev.Saved(report.version) if not self._unsaved else None
            case msg.Failed():
                return ev.Died(*who, report.reason)

    def _group_result(self, arrival: Arrival, report: msg.GroupResult) -> ev.AnyEvent:
        group = report.group
        facts = facts_of(group)
        if group.ordinal in self._controller.executors[arrival.executor].groups:
            self._store.put(group)
            if not is_evaluation(group.ordinal):
                self._watcher.group_done(arrival.executor, facts)
        return ev.GroupDone(arrival.executor, arrival.incarnation, group.ordinal, facts)

    # Commands become messages

    def _start(self, command: ev.Start) -> None:
        if command.incarnation:
            self._watcher.restarted(command.executor)
        self._engine.spawn(command.executor, command.incarnation)

    def _run_group(self, command: ev.RunGroup) -> None:
        if command.ordinal not in self._store:
            self._store.put(self._prompts.group(command.ordinal))
        self._engine.send(command.executor, msg.WorkOnGroup(self._store.get(command.ordinal)))

    def _run_batch(self, command: ev.RunBatch) -> None:
        rollouts = self._store.rollouts(command.ordinals)
        self._engine.send(command.executor, msg.WorkOnBatch(command.update, rollouts))

    def _save(self, command: ev.Save) -> None:
        for role in self._controller.line.batch_roles:
            folder = self._folder.snapshot(command.version) / _part_name(role.name)
            self._unsaved.add(f"{role.name}/0")
            self._engine.send(f"{role.name}/0", msg.SavePolicy(command.version, str(folder)))

    def _write(self, command: ev.Write) -> None:
        if isinstance(command.record, Dropped):
            self._store.drop(command.record.ordinal)
            self._watcher.dropped(command.record.ordinal, command.record.reason)
        self._folder.ledger.append(encode_line(command.record))

    def _forget(self, command: ev.Forget) -> None:
        for ordinal in command.ordinals:
            self._store.drop(ordinal)

    def _evaluated(self, command: ev.Evaluated) -> None:
        rewards = [reward for group in self._store.rollouts(command.ordinals) for reward in group.rewards]
        self._watcher.evaluated(command.version, sum(rewards) / len(command.ordinals))

    def _finish(self, command: ev.Finish) -> None:
        self._ended = True

    def _abort(self, command: ev.Abort) -> None:
        raise JobFailed(command.reason)


def _part_name(role: str) -> str:
    """The trainer's part of a snapshot is what users want: the policy."""
    return "policy" if role == "trainer" else role
