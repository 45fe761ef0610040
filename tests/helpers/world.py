"""A simulated world for the controller: fake executors, in any order that `choose` picks, with deaths and duplicates.

It checks the rules of the flow at every command, from its own observations, not from the controller's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

from llamarl.config import EvaluateConfig, ScheduleConfig, SnapshotsConfig
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.ledger import Dropped, Record, Replaced
from llamarl.controller.ledger_state import audit
from llamarl.controller.line import Channel, Line, Role
from llamarl.types import GroupFacts, GroupKind


def standard_line(
    *, replicas: int = 1, capacity: int = 4, trainer_restarts: bool = True, extra: Sequence[Role] = ()
) -> Line:
    """generator -> reward -> any extra roles -> trainer, with weights back to the generator."""
    names = ["task", "generator", "reward", *(role.name for role in extra), "trainer"]
    links = [Channel(f"to_{b}", "groups", a, b) for a, b in pairwise(names)]
    return Line(
        [
            Role(name="generator", unit="group", done="generated", executors=replicas, capacity=capacity),
            Role(name="reward", unit="group", done="scored", capacity=capacity),
            *extra,
            Role(name="trainer", unit="batch", done="trained", restartable=trainer_restarts),
        ],
        [*links, Channel("weights", "weights", "trainer", "generator")],
    )


class World:
    def __init__(
        self,
        line: Line,
        schedule: ScheduleConfig,
        prompts: int = 0,
        every: int = 0,
        save_every: int = 0,
        begin: ev.AnyEvent | None = None,
        at_end: Literal["whole", "policy", "none"] = "whole",
        flat: Callable[[int], bool] = lambda ordinal: False,
        records: Sequence[Record] = (),
    ) -> None:
        """`flat(ordinal)`: all rewards of the group are equal. `records` are those of earlier starts."""
        self.schedule, self.flat = schedule, flat
        snapshots = SnapshotsConfig(every=save_every, at_end=at_end)
        self.controller = Controller(line, schedule, EvaluateConfig(prompts=prompts, every=every), snapshots)
        self.line = line
        self.capacity = {role.name: role.capacity for role in line.roles}
        self.outstanding: list[ev.AnyCommand] = []
        self.history: list[ev.AnyEvent] = []
        self.records: list[Record] = list(records)
        self.newest = -1
        self.told_to_publish = -1
        self.holds: dict[str, int] = {}  # version of each executor's weights
        self.held_groups: dict[str, set[int]] = {}
        self.kinds: dict[int, GroupKind] = {}
        self.first_version: dict[int, int] = {}
        self.trained_batches: list[tuple[int, tuple[int, ...]]] = []
        self.evaluated: list[ev.Evaluated] = []
        self.end: ev.AnyCommand | None = None
        self.forgotten: set[int] = set()
        self.commands: list[ev.AnyCommand] = []
        self.feed(begin or ev.Began())

    def feed(self, event: ev.AnyEvent) -> None:
        self.history.append(event)
        for command in self.controller.handle(event):
            self.commands.append(command)
            self._obey(command)

    def run(self, choose: Callable[[int], int], max_steps: int = 100_000) -> None:
        """Complete outstanding work in the chosen order until the controller ends the job."""
        for _ in range(max_steps):
            if self.end is not None:
                return
            assert self.outstanding, "deadlock: nothing is under way and the job has not ended"
            self.complete(choose(len(self.outstanding)))
        raise AssertionError("the job does not end")

    def complete(self, index: int, fail: str = "") -> None:
        command = self.outstanding.pop(self._first_load(index))
        match command:
            case ev.Start():
                self.feed(ev.Started(command.executor, command.incarnation))
            case ev.Load():
                self.holds[command.executor] = command.version
                self.feed(ev.Loaded(command.executor, command.incarnation, command.version))
            case ev.RunGroup():
                self.held_groups[command.executor].discard(command.ordinal)
                if fail:
                    self.feed(ev.GroupFailed(command.executor, command.incarnation, command.ordinal, fail))
                else:
                    flat = command.executor.startswith("reward") and self.flat(command.ordinal)
                    facts = GroupFacts(1, self.first_version.get(command.ordinal, 0), self.newest, 0.5, flat)
                    self.feed(ev.GroupDone(command.executor, command.incarnation, command.ordinal, facts))
            case ev.RunBatch():
                self.feed(ev.BatchDone(command.executor, command.incarnation, command.update))
            case ev.Save():
                self.feed(ev.Saved(command.executor, command.incarnation, command.version))
            case ev.Commit():
                self.feed(ev.Committed(command.version))
            case ev.Publish():
                self.feed(ev.Published(command.executor, command.incarnation, command.version))
            case _:
                raise AssertionError(f"not work: {command}")

    def _first_load(self, index: int) -> int:
        """Index of the executor's first load: it loads weights in the order of its commands, whatever else is reordered."""
        chosen = self.outstanding[index]
        if not isinstance(chosen, ev.Load):
            return index
        loads = (isinstance(c, ev.Load) and c.executor == chosen.executor for c in self.outstanding)
        return list(loads).index(True)

    def kill(self, executor: str) -> None:
        incarnation = self.controller.executors[executor].incarnation
        self._take_away(executor)
        self.feed(ev.Died(executor, incarnation, "killed"))

    def join(self, executor: str) -> None:
        self.feed(ev.Joined(executor, "a host"))

    def leave(self, executor: str) -> None:
        self._take_away(executor)
        self.feed(ev.Left(executor, "its host left"))

    def _take_away(self, executor: str) -> None:
        self.outstanding = [c for c in self.outstanding if getattr(c, "executor", "") != executor]
        self.holds.pop(executor, None)
        self.held_groups.pop(executor, None)

    def check_end(self) -> None:
        report = audit(self.records)
        assert report.clean, report
        assert isinstance(self.end, ev.Finish)
        assert report.updates == self.schedule.updates
        replaced = self.replaced
        assert max(Counter(replaced.values()).values(), default=0) <= self.schedule.dynamic_sampling, "over the budget"
        assert report.num_groups == self.schedule.num_groups + len(replaced)
        assert all(map(self.flat, replaced)), "replaced a group that has variance"

    @property
    def replaced(self) -> dict[int, int]:
        """Replaced groups, and the update in whose batch another took their place."""
        return {record.ordinal: record.update for record in self.records if isinstance(record, Replaced)}

    def due_version(self, ordinal: int) -> int:
        """The version that must sample a group in deterministic mode. Version v samples P groups, the first one (S+1)*P, and
        one more for each group that was replaced in batch v."""
        places, replaced = self.schedule.num_places, Counter(self.replaced.values())
        version = 0
        while ordinal >= (places := places + replaced[version]):
            places += self.schedule.groups_per_update
            version += 1
        return version

    def _obey(self, command: ev.AnyCommand) -> None:
        match command:
            case ev.Write():
                self.records.append(command.record)
            case ev.RunGroup():
                self._check_group(command)
                self.outstanding.append(command)
            case ev.RunBatch():
                self._check_batch(command)
                self.outstanding.append(command)
            case ev.Load():
                self._check_load(command)
                self.outstanding.append(command)
            case ev.Publish():
                self.told_to_publish = max(self.told_to_publish, command.version)
                self.outstanding.append(command)
            case ev.Start() | ev.Save() | ev.Commit():
                self.outstanding.append(command)
            case ev.Evaluated():
                self.evaluated.append(command)
            case ev.Forget():
                self.forgotten.update(command.ordinals)
            case ev.Dismiss():
                self._take_away(command.executor)
            case ev.Finish() | ev.Abort():
                self.end = command
            case _:
                pass
        self.newest = self.controller.newest

    def _check_load(self, command: ev.Load) -> None:
        if not self.schedule.deterministic:
            assert command.version == self.controller.newest, "sent to load a version that is not the newest"
            return
        assert command.version >= self.told_to_publish - 1, "sent to load a version whose slot is taken"
        assert not self.held_groups.get(command.executor), "sent to change weights with answers under way"

    def _check_group(self, command: ev.RunGroup) -> None:
        role = command.executor.partition("/")[0]
        self.kinds[command.ordinal] = command.kind
        held = self.held_groups.setdefault(command.executor, set())
        held.add(command.ordinal)
        weights = [1 if self.kinds[ordinal] == "evaluation" else self.schedule.samples_per_group for ordinal in held]
        assert sum(weights) <= self.capacity[role], "given more than its capacity"
        if command.kind == "probe":
            self.forgotten.discard(command.ordinal)  # after a rewind it is asked anew
        assert command.ordinal not in self.forgotten, "asked for a group that was forgotten"
        if role != self.line.group_roles[0].name:
            return
        version = self.holds.get(command.executor)
        assert version is not None, "admitted to a replica without weights"
        if command.kind == "train":
            if self.schedule.deterministic:
                assert version == self.due_version(command.ordinal), "sampled by another version"
            else:
                assert version == self.controller.newest, "admitted to a stale replica"
            self.first_version[command.ordinal] = version

    def _check_batch(self, command: ev.RunBatch) -> None:
        assert len(command.ordinals) == self.schedule.groups_per_update
        assert not set(command.ordinals) & self.forgotten, "trains on groups that were forgotten"
        assert not self.replaced.keys() & set(command.ordinals), "trains on a group that was replaced"
        dropped = {record.ordinal for record in self.records if isinstance(record, Dropped)}
        for ordinal in set(command.ordinals) - dropped:  # a dropped group has no tokens that could be stale
            staleness = command.update - self.first_version[ordinal]
            assert 0 <= staleness <= self.schedule.staleness_bound, f"group {ordinal} is {staleness} versions old"
        self.trained_batches.append((command.update, command.ordinals))
