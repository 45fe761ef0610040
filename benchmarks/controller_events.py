"""How many events a second the controller handles on one core, from one generator replica to a thousand.

    python benchmarks/controller_events.py [--replicas 1 64 1024] [--events 200000] [--json result.json]

The real Controller drives executors that only pretend: each command is answered by the event that finishes it, in a
random order, so that groups overtake each other as they do in a job. `controller` is the loop with nothing else in it
(the pretence costs time too, so the figure is a lower bound); `recorded` also encodes every event and every ledger
record, as a job does before it writes them. Seconds are those of the one core that is used, so other programs on the
machine hardly matter. Exits with 1 when the controller is slower than promised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import msgspec

from llamarl.config import EvaluateConfig, ScheduleConfig, SnapshotsConfig
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.ledger import encode_record
from llamarl.controller.line import SOURCE, Channel, Line, Role
from llamarl.types import GroupFacts

PROMISED_PER_S = 20_000
SAMPLES, SLOTS = 8, 256
EVENTS_PER_GROUP = 2  # generated and scored; updates, publications and loads come on top
FACTS = GroupFacts(num_tokens=256, first_version=0, last_version=1, reward=0.5)


def job_line(replicas: int) -> Line:
    """The default job's line, with a scorer for every 64 replicas."""
    rewards = max(1, replicas // 64)
    return Line(
        [
            Role(name="generator", unit="group", done="generated", executors=replicas, capacity=SLOTS),
            Role(name="reward", unit="group", done="scored", executors=rewards, capacity=4 * SAMPLES),
            Role(name="trainer", unit="batch", done="trained"),
        ],
        [
            Channel("prompts", "groups", SOURCE, "generator"),
            Channel("completions", "groups", "generator", "reward"),
            Channel("rollouts", "groups", "reward", "trainer"),
            Channel("weights", "weights", "trainer", "generator"),
        ],
    )


def job_schedule(replicas: int, num_events: int, window: int) -> ScheduleConfig:
    """One version ahead (S = 1), with as many places as all slots together, so that every replica is kept full."""
    groups = replicas * SLOTS // SAMPLES // 2
    return ScheduleConfig(
        updates=max(2, num_events // (EVENTS_PER_GROUP * groups)),
        groups_per_update=groups,
        samples_per_group=SAMPLES,
        max_staleness=1,
        window=window,
    )


def answer(command: ev.AnyCommand) -> ev.AnyEvent | None:
    """What the executor would report when it has done as told; None for what is told to nobody."""
    match command:
        case ev.RunGroup():
            return ev.GroupDone(command.executor, command.incarnation, command.ordinal, FACTS)
        case ev.Start():
            return ev.Started(command.executor, command.incarnation)
        case ev.Load():
            return ev.Loaded(command.executor, command.incarnation, command.version)
        case ev.RunBatch():
            return ev.BatchDone(command.executor, command.incarnation, command.update)
        case ev.Publish():
            return ev.Published(command.executor, command.incarnation, command.version)
        case ev.Save():
            return ev.Saved(command.executor, command.incarnation, command.version)
        case ev.Commit():
            return ev.Committed(command.version)
        case _:
            return None


def drive(controller: Controller, random: Random, *, recorded: bool) -> int:
    """The whole job; returns the number of events that it took."""
    under_way: list[ev.AnyEvent] = [ev.Began()]
    num_events = 0
    encode = msgspec.json.Encoder().encode
    while under_way:
        # Any of them may be the next to finish: the last takes the place of the one that is picked.
        index = int(random.random() * len(under_way))
        event, under_way[index] = under_way[index], under_way[-1]
        under_way.pop()
        num_events += 1
        commands = controller.handle(event)
        if recorded:
            encode(event)
        for command in commands:
            if recorded and isinstance(command, ev.Write):
                encode_record(command.record)
            if (next_event := answer(command)) is not None:
                under_way.append(next_event)
    if not controller.finished:
        raise SystemExit("the job did not end: the figures would mean nothing")
    return num_events


def measure(replicas: int, num_events: int, window: int, repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = {"controller": [], "recorded": []}
    handled: Counter[str] = Counter()
    for repeat in range(repeats):
        for name, rates in found.items():
            schedule = job_schedule(replicas, num_events, window)
            controller = Controller(job_line(replicas), schedule, EvaluateConfig(), SnapshotsConfig())
            started_s = time.process_time()
            handled[name] = drive(controller, Random(repeat), recorded=name == "recorded")
            rates.append(handled[name] / (time.process_time() - started_s))
    return {
        "replicas": replicas,
        "window": window,
        "groups_per_update": controller.schedule.groups_per_update,
        "updates": controller.schedule.updates,
        "events": handled["controller"],
        "events_per_s": statistics.median(found["controller"]),
        "events_per_s_recorded": statistics.median(found["recorded"]),
    }


def print_table(rows: list[dict[str, float]]) -> None:
    print("| replicas | window | groups per update | updates | events | controller, events/s | recorded, events/s |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['replicas']:,} | {row['window']:,} | {row['groups_per_update']:,} | {row['updates']:,} "
            f"| {row['events']:,} | {row['events_per_s']:,.0f} | {row['events_per_s_recorded']:,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--events", type=int, default=200_000, help="about how many events each job takes")
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many runs is reported")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    rows = [
        measure(replicas, args.events, window, args.repeats)
        for replicas in args.replicas
        for window in (1, replicas * SLOTS // SAMPLES // 4)
    ]
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(min(row["events_per_s"] for row in rows) < PROMISED_PER_S)


if __name__ == "__main__":
    main()
