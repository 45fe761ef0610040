"""A published sweep of staleness, predicted: two parameters from its first two points, the other three follow.

    python benchmarks/staleness_sweep.py [--json result.json]

marin-community/marin issue 8955 (15 September 2026): 100 updates of a 67B model on 32 training and 8 generating H100s, wall
seconds by the allowed staleness. Fixed before anything was fitted, from issues 8936 and 8955: 32 prompts x 4 answers an
update; the lengths of the answers (a limit of 2,048 tokens, which 17.44% reach, and a mean of 1,035); 7.9 s of training and
3.9 s of weights an update. Fitted on staleness 0 and 1: the seconds of a decode step, as a + b * answers under way, which is
what a step costs while reading weights (a) and caches (b) is what takes the time. The controller is the real one, with a
window over all its places, since there any group that is whole may be trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from llamarl.config import EvaluateConfig, ScheduleConfig, SnapshotsConfig
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.line import SOURCE, Channel, Line, Role
from llamarl.observe.timeline import Timeline
from llamarl.plan.gpus import EngineFactors
from llamarl.plan.lengths import lognormal_with
from llamarl.simulate.answers import Answers
from llamarl.simulate.clock import Clock, Device
from llamarl.simulate.decoding import Decoding
from llamarl.simulate.simulation import Simulation
from llamarl.simulate.workers import GeneratorWorker, QueueWorker, WorkItem

PUBLISHED = {0: 6235.0, 1: 4360.0, 2: 3544.0, 3: 3142.0, 4: 2942.0}
UPDATES, GROUPS, SAMPLES, LIMIT = 100, 32, 4, 2048
MEAN, TRUNCATED = 1035.0, 0.1744
TRAIN_S, WEIGHTS_S = 7.9, 3.9
LENGTHS = lognormal_with(MEAN, TRUNCATED, LIMIT)
FREE = EngineFactors(group_s=0, message_s=0, update_s=0, score_s=0)


class Pace:
    """A decode step takes a + b * answers under way."""

    prompt, slots, late_steps = 0, 1 << 30, 0.0

    def __init__(self, a: float, b: float) -> None:
        self._a, self._b = a, b

    def step_s(self, active: float, cached_tokens: float) -> float:
        return self._a + self._b * active

    def growth_s(self, active: int, cached_tokens: float) -> float:
        return 0.0

    def prefill_s(self, groups: int) -> float:
        return 0.0


def line() -> Line:
    everything = 1 << 30
    return Line(
        [
            Role(name="generator", unit="group", done="scored", capacity=everything),
            Role(name="trainer", unit="batch", done="trained"),
        ],
        [
            Channel("prompts", "groups", SOURCE, "generator"),
            Channel("rollouts", "groups", "generator", "trainer"),
            Channel("weights", "weights", "trainer", "generator"),
        ],
    )


def trainer_plan(command: ev.ExecutorCommand) -> WorkItem:
    match command:
        case ev.RunBatch():
            return WorkItem(TRAIN_S, "update", ev.BatchDone(command.executor, command.incarnation, command.update))
        case ev.Publish():
            done = ev.Published(command.executor, command.incarnation, command.version)
            return WorkItem(WEIGHTS_S if command.version else 0.0, "publish", done)
        case _:
            return WorkItem(0.0, "save")


def total_s(a: float, b: float, staleness: int) -> float:
    """Seconds of the whole run."""
    places = (staleness + 1) * GROUPS
    schedule = ScheduleConfig(
        updates=UPDATES,
        groups_per_update=GROUPS,
        samples_per_group=SAMPLES,
        max_staleness=staleness,
        window=places,
        probe_every=0,
    )
    answers = Answers(LENGTHS, samples=SAMPLES, prompt=0, seed=17)
    timeline = Timeline()
    clock = Clock(timeline)
    clock.seat(GeneratorWorker("generator/0", Decoding(Pace(a, b)), answers, FREE, load_s=0.0), Device())
    clock.seat(QueueWorker("trainer/0", trainer_plan), Device())
    controller = Controller(line(), schedule, EvaluateConfig(prompts=0), SnapshotsConfig(every=0))
    return Simulation(controller, clock, timeline, answers, ranks={}).run().wall_s


def fit() -> tuple[float, float]:
    """Newton's method on both times, from a plausible start."""
    a, b = 15e-3, 50e-6
    for _ in range(12):
        found = [total_s(a, b, age) for age in (0, 1)]
        misses = [PUBLISHED[age] - found[age] for age in (0, 1)]
        if max(abs(miss) for miss in misses) < 1.0:
            break
        by_a = [(total_s(a * 1.01, b, age) - found[age]) / (0.01 * a) for age in (0, 1)]
        by_b = [(total_s(a, b * 1.01, age) - found[age]) / (0.01 * b) for age in (0, 1)]
        determinant = by_a[0] * by_b[1] - by_a[1] * by_b[0]
        a += (misses[0] * by_b[1] - misses[1] * by_b[0]) / determinant
        b += (by_a[0] * misses[1] - by_a[1] * misses[0]) / determinant
        a, b = max(a, 1e-4), max(b, 1e-7)
    return a, b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    a, b = fit()
    rows = {age: total_s(a, b, age) for age in PUBLISHED}
    print(f"lengths {LENGTHS.spec}; a decode step: {a * 1e3:.2f} ms + {b * 1e6:.1f} us for each answer under way\n")
    print("| staleness | published, s | predicted, s | error | |\n|---:|---:|---:|---:|---|")
    for age, found in rows.items():
        fitted = "fitted" if age < 2 else ""
        print(f"| {age} | {PUBLISHED[age]:,.0f} | {found:,.0f} | {found / PUBLISHED[age] - 1:+.1%} | {fitted} |")
    if args.json:
        args.json.write_text(json.dumps({"a_s": a, "b_s": b, "predicted_s": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
