"""Simulated chaos: the controller under a seeded virtual clock, with delays, reordering, duplicates, deaths, late messages
of dead executors, hangs and restarts. The simulated world checks the rules of the flow after every event."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from msgspec import structs

from helpers.world import World, standard_line
from llamarl.config import ScheduleConfig
from llamarl.controller import events as ev
from llamarl.controller.line import Line

SILENCE_S = 60.0  # time after which a hung executor is killed
MIN_EVENTS, MIN_FAULTS = 200, 3


@dataclass(frozen=True)
class SimulationSetup:
    """The scenario of one seed: a line, a schedule, and the number of faults."""

    line: Line
    schedule: ScheduleConfig
    prompts: int
    evaluate_every: int
    save_every: int
    faults: int
    flat_share: float = 0.0  # share of groups whose rewards are all equal


def scene_of(seed: int) -> SimulationSetup:
    chance = random.Random(seed)
    groups, staleness = chance.randint(1, 5), chance.randint(0, 3)
    deterministic = chance.random() < 0.4
    window = 1 if deterministic else min(chance.randint(1, 4), (staleness + 1) * groups)
    schedule = ScheduleConfig(
        updates=int(MIN_EVENTS / (2.8 * groups)) + chance.randint(1, 3),
        groups_per_update=groups,
        samples_per_group=2,
        max_staleness=staleness,
        window=window,
        deterministic=deterministic,
        probe_every=chance.choice([0, 2, 5]),
        max_restarts=10_000,
        max_attempts=10_000,
    )
    line = standard_line(replicas=chance.randint(1, 3), capacity=chance.randint(2, 12))
    scene = SimulationSetup(
        line,
        schedule,
        chance.choice([0, 2]),
        chance.choice([0, 4]),
        chance.choice([0, 1, 3]),
        chance.randint(MIN_FAULTS, 8),
    )
    # Drawn last, so that the other choices of a seed stay as they were.
    budget = chance.randint(1, 4) if chance.random() < 0.4 and not (deterministic and staleness > 1) else 0
    return replace(scene, schedule=structs.replace(schedule, dynamic_sampling=budget), flat_share=chance.random())


class Chaos(World):
    """Every piece of work takes a random time; faults strike at random moments."""

    def __init__(self, scene: SimulationSetup, seed: int) -> None:
        self._chance = random.Random(seed ^ 0x5EED)
        self.now_s, self.faults = 0.0, 0
        self._fault_at = sorted(self._chance.sample(range(5, MIN_EVENTS - 20), scene.faults))  # counted in events
        self._done_at_s: dict[int, float] = {}  # keyed by the identity of the command
        self._kept: list[ev.AnyCommand] = []
        self._late: list[ev.AnyEvent] = []  # messages that arrive a second time, or after their sender's death
        super().__init__(
            scene.line,
            scene.schedule,
            scene.prompts,
            scene.evaluate_every,
            scene.save_every,
            flat=lambda ordinal: random.Random(seed * 1_000_003 + ordinal).random() < scene.flat_share,
        )

    def play(self, max_events: int = 50_000) -> None:
        for _ in range(max_events):
            if self.end is not None:
                return
            assert self.outstanding, "deadlock: nothing is under way and the job has not ended"
            dice = self._chance.random()
            if self._fault_at and len(self.history) >= self._fault_at[0]:
                self._fault()
            elif self._late and dice < 0.08:
                self.feed(self._late.pop(self._chance.randrange(len(self._late))))
            else:
                self._work()
        raise AssertionError("the job does not end")

    def _work(self) -> None:
        """The command that is done next on the virtual clock."""
        index = min(range(len(self.outstanding)), key=lambda at: self._time_of(self.outstanding[at]))
        self.now_s = max(self.now_s, self._time_of(self.outstanding[index]))
        before = len(self.history)
        self.complete(index)
        said = self.history[before]
        # Messages of one executor arrive in order, perhaps twice: a new one rules out repeats of older ones.
        self._late = [word for word in self._late if _speaker(word) != _speaker(said)]
        # A probe may be asked of the same executor again, under its old ordinal: its answers are not repeated here.
        of_probe = isinstance(said, ev.GroupDone) and self.kinds[said.ordinal] == "probe"
        if self._chance.random() < 0.05 and not of_probe:
            self._late.append(said)

    def _time_of(self, command: ev.AnyCommand) -> float:
        if id(command) not in self._done_at_s:
            quick = self._chance.random() < 0.9
            takes_s = self._chance.expovariate(1.0) if quick else self._chance.uniform(5, 40)
            self._done_at_s[id(command)] = self.now_s + takes_s
            self._kept.append(command)  # kept alive, so that its identity is not reused
        return self._done_at_s[id(command)]

    def _fault(self) -> None:
        """Cause a death, or a hang that the engine ends at its deadline; messages of the dead executor may still arrive."""
        self._fault_at.pop(0)
        self.faults += 1
        executor = self._chance.choice(sorted(self.controller.executors))
        if self._chance.random() < 0.3:
            self.now_s += SILENCE_S
        held = [command for command in self.outstanding if getattr(command, "executor", "") == executor]
        self._late += [word for command in held if (word := _word_of(command)) is not None]
        self.kill(executor)


def _speaker(event: ev.AnyEvent) -> tuple[str, int] | None:
    return (event.executor, event.incarnation) if isinstance(event, ev.ExecutorEvent) else None


def _word_of(command: ev.AnyCommand) -> ev.AnyEvent | None:
    """The event that the executor would have reported."""
    match command:
        case ev.RunBatch():
            return ev.BatchDone(command.executor, command.incarnation, command.update)
        case ev.Publish():
            return ev.Published(command.executor, command.incarnation, command.version)
        case ev.Load():
            return ev.Loaded(command.executor, command.incarnation, command.version)
        case _:
            return None


def play(seed: int) -> Chaos:
    """Play one seed to its end. An AssertionError says which rule was broken."""
    chaos = Chaos(scene_of(seed), seed)
    chaos.play()
    chaos.check_end()
    return chaos
