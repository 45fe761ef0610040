"""A simulated world with agents: groups whose agents make calls, which replicas of the generator answer.

As in `world.py`, the rules are checked at every command, from the world's own observations.
"""

from __future__ import annotations

import random

from helpers.chaos import MIN_EVENTS, MIN_FAULTS, Chaos, SimulationSetup
from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller.line import Channel, Line, Role
from llamarl.types import GroupFacts

MOST_CALLS = 4


def agent_line(*, agents: int = 1, room: int = 8, replicas: int = 1, capacity: int = 4) -> Line:
    """agent -> reward -> trainer; agents call generators, which read the trainer's weights."""
    return Line(
        [
            Role(name="agent", unit="group", done="generated", executors=agents, capacity=room),
            Role(name="generator", unit="call", done="answered", executors=replicas, capacity=capacity),
            Role(name="reward", unit="group", done="scored", capacity=8),
            Role(name="trainer", unit="batch", done="trained"),
        ],
        [
            Channel("prompts", "groups", "task", "agent"),
            Channel("completions", "groups", "agent", "reward"),
            Channel("rollouts", "groups", "reward", "trainer"),
            Channel("calls", "calls", "agent", "generator"),
            Channel("weights", "weights", "trainer", "generator"),
        ],
    )


def agent_scene(seed: int) -> SimulationSetup:
    chance = random.Random(seed)
    groups, staleness = chance.randint(1, 4), chance.randint(0, 3)
    schedule = ScheduleConfig(
        updates=int(MIN_EVENTS / (6 * groups)) + chance.randint(1, 3),
        groups_per_update=groups,
        samples_per_group=2,
        max_staleness=staleness,
        window=min(chance.randint(1, 4), (staleness + 1) * groups),
        probe_every=chance.choice([0, 2, 5]),
        max_restarts=10_000,
        max_attempts=10_000,
    )
    line = agent_line(
        agents=chance.randint(1, 2),
        room=chance.randint(2, 10),
        replicas=chance.randint(1, 3),
        capacity=chance.randint(2, 6),
    )
    faults = chance.randint(MIN_FAULTS, 8)
    return SimulationSetup(line, schedule, chance.choice([0, 3]), chance.choice([0, 2]), chance.choice([0, 2]), faults)


class AgentChaos(Chaos):
    """Agents make up to `MOST_CALLS` calls one after the other, some at the same time, and lose patience with some."""

    def __init__(self, scene: SimulationSetup, seed: int) -> None:
        self._mind = random.Random(seed ^ 0xA6E47)
        self._next_call = ev.FIRST_CALL
        self._calls_left: dict[int, int] = {}  # group -> calls that its agents will still make
        self._thinking: dict[int, ev.RunGroup] = {}  # groups whose agents wait for answers
        self.unanswered: dict[int, tuple[int, str, int]] = {}  # call -> group, caller, completions
        self.admitted: dict[int, int] = {}
        self.versions: dict[int, list[int]] = {}  # group -> versions that began to answer its calls
        self.num_answered = self.num_moved = 0
        super().__init__(scene, seed)

    def complete(self, index: int, fail: str = "") -> None:
        command = self.outstanding[self._first_load(index)]
        if isinstance(command, ev.RunGroup) and command.kind == "call":
            self.outstanding.remove(command)
            self._answer(command)
        elif isinstance(command, ev.RunGroup) and command.executor.startswith("agent"):
            if left := self._calls_left[command.ordinal]:
                self.outstanding.remove(command)
                self._call(command, left)
            else:
                self.first_version[command.ordinal] = min(self.versions[command.ordinal])
                super().complete(index, fail)
        else:
            super().complete(index, fail)

    def _call(self, command: ev.RunGroup, left: int) -> None:
        """The agents of a group ask, one or two of them at the same time."""
        at_once = min(left, self._mind.choice([1, 1, 2]))
        self._calls_left[command.ordinal] -= at_once
        self._thinking[command.ordinal] = command
        for _ in range(at_once):
            call, completions = self._next_call, self._mind.choice([1, 1, 2])
            self._next_call += 1
            self.unanswered[call] = (command.ordinal, command.executor, completions)
            self.feed(ev.CallMade(command.executor, command.incarnation, call, command.ordinal, completions))
        if self._mind.random() < 0.1:
            self._lose_patience(command)

    def _lose_patience(self, command: ev.RunGroup) -> None:
        for call in [call for call, (ordinal, _, _) in self.unanswered.items() if ordinal == command.ordinal]:
            del self.unanswered[call]
            self.feed(ev.CallEnded(command.executor, command.incarnation, call))
        self._calls_left[command.ordinal] += 1  # a group without any call would have no tokens
        self._go_on(command.ordinal)

    def _answer(self, command: ev.RunGroup) -> None:
        self.held_groups[command.executor].discard(command.ordinal)
        ordinal, _, _ = self.unanswered.pop(command.ordinal)
        self.num_answered += 1
        self.feed(ev.GroupDone(command.executor, command.incarnation, command.ordinal, GroupFacts(1)))
        self._go_on(ordinal)

    def _go_on(self, ordinal: int) -> None:
        if ordinal in self._thinking and all(ordinal != group for group, _, _ in self.unanswered.values()):
            self.outstanding.append(self._thinking.pop(ordinal))

    def _take_away(self, executor: str) -> None:
        super()._take_away(executor)
        for ordinal, command in list(self._thinking.items()):
            if command.executor == executor:
                del self._thinking[ordinal]
        self.unanswered = {call: made for call, made in self.unanswered.items() if made[1] != executor}

    def _obey(self, command: ev.AnyCommand) -> None:
        if isinstance(command, ev.CancelCall):
            held = [c for c in self.outstanding if isinstance(c, ev.RunGroup) and c.ordinal == command.call]
            assert [c.executor for c in held] == [command.executor], "cancelled where it is not"
            self.outstanding.remove(held[0])
            self.held_groups[command.executor].discard(command.call)
        assert not isinstance(command, ev.RefuseCall), "no call is worn out here"
        super()._obey(command)

    def _check_group(self, command: ev.RunGroup) -> None:
        role = command.executor.partition("/")[0]
        self.kinds[command.ordinal] = command.kind
        held = self.held_groups.setdefault(command.executor, set())
        held.add(command.ordinal)
        assert sum(map(self._size, held)) <= self.capacity[role], "given more than its capacity"
        if command.kind == "probe":
            self.forgotten.discard(command.ordinal)
            assert role == "generator" and self.holds[command.executor] == self.controller.newest
        assert command.ordinal not in self.forgotten, "asked for a group that was forgotten"
        if role == "agent":
            assert self.controller.newest >= 0, "admitted before there are weights"
            self.admitted.setdefault(command.ordinal, self.controller.newest)
            self.versions[command.ordinal] = []
            self._calls_left[command.ordinal] = self._mind.randint(1, MOST_CALLS)
        elif command.kind == "call":
            self._check_call(command)

    def _size(self, ordinal: int) -> int:
        kind = self.kinds[ordinal]
        if kind == "call":
            return self.unanswered[ordinal][2]
        return 1 if kind == "evaluation" else self.schedule.samples_per_group

    def _check_call(self, command: ev.RunGroup) -> None:
        assert command.ordinal in self.unanswered, "asked for an answer that nobody waits for"
        ordinal, version = self.unanswered[command.ordinal][0], self.holds[command.executor]
        if self.kinds[ordinal] == "train":
            assert version >= self.admitted[ordinal], "answered by a version older than the group's admission"
        self.versions[ordinal].append(version)

    def check_end(self) -> None:
        super().check_end()
        for done in self.evaluated:
            for ordinal in done.ordinals:
                assert set(self.versions[ordinal]) == {done.version}, "an evaluation of several versions"


def play_agents(seed: int) -> AgentChaos:
    """Play one seed to its end. An AssertionError says which rule was broken."""
    chaos = AgentChaos(agent_scene(seed), seed)
    chaos.play()
    chaos.check_end()
    return chaos
