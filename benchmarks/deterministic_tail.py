"""The price of determinism where answers have heavy tails: generators and trainers that only take time, on the real engine.

    python benchmarks/deterministic_tail.py [--updates 24] [--sigma 0 0.5 1 1.5] [--staleness 1 2] [--json result.json]

A group takes as long as the longest of its answers, whose lengths are log-normal (median 1, cut off at 16); all groups under
way are decoded side by side. An update takes as long as a batch's answers would on average, so that neither side always waits
for the other. Free, weights change under answers in flight; deterministic, a version's last answers are waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pretending import GROUPS, SAMPLES, PretendedGenerator, PretendedTrainer, update_times  # beside this script

from llamarl import Job
from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.builders.trainer import build_trainer
from llamarl.config.file import load_config
from llamarl.executors.executor import Executor
from llamarl.messages import Report
from llamarl.types import PromptGroup

SIGMA = "TAIL_SIGMA"
MEDIAN_S, LONGEST = 0.06, 16.0
SLICE_S = 0.002
WARM_UP = 4


def group_s(ordinal: int) -> float:
    """The same for the same group in every run."""
    lengths = np.random.default_rng([abs(ordinal), 1]).lognormal(0.0, float(os.environ[SIGMA]), SAMPLES)
    return MEDIAN_S * float(min(lengths.max(), LONGEST))


def mean_group_s() -> float:
    return float(np.mean([group_s(ordinal) for ordinal in range(1000)]))


class SleepingGenerator(PretendedGenerator):
    def __init__(self, honest: Executor) -> None:
        super().__init__(honest)
        self._until: dict[int, tuple[float, PromptGroup]] = {}

    @property
    def idle(self) -> bool:
        return not self._until

    def take(self, group: PromptGroup) -> None:
        self._until[group.ordinal] = (time.monotonic() + group_s(group.ordinal), group)

    def work(self) -> Iterable[Report]:
        time.sleep(SLICE_S)
        done = [ordinal for ordinal, (until_s, _) in self._until.items() if until_s <= time.monotonic()]
        return [self.answer(self._until.pop(ordinal)[1]) for ordinal in done]


def sleeping_generator(site: BuildContext) -> Executor:
    return SleepingGenerator(build_generator(site))


def sleeping_trainer(site: BuildContext) -> Executor:
    update_s = mean_group_s()
    return PretendedTrainer(build_trainer(site), lambda: time.sleep(update_s))


def update_s(updates: int, staleness: int, *, deterministic: bool) -> float:
    settings = [
        f"schedule.updates={updates + WARM_UP}",
        f"schedule.groups_per_update={GROUPS}",
        f"schedule.samples_per_group={SAMPLES}",
        f"schedule.max_staleness={staleness}",
        f"schedule.deterministic={str(deterministic).lower()}",
        f"generator.slots={(staleness + 1) * GROUPS * SAMPLES}",
        "schedule.probe_every=0",
        "evaluate.prompts=0",
    ]
    builders = {"generator": sleeping_generator, "trainer": sleeping_trainer}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        Job(load_config(None, settings), builders=builders).run(folder)
        times = update_times(folder)
    return (times[-1] - times[WARM_UP - 1]) / updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(
        "| sigma | S | longest group of a batch / mean | free, s | deterministic, s | price |\n|---|---|---|---|---|---|"
    )
    for sigma in args.sigma:
        os.environ[SIGMA] = str(sigma)
        batches = np.array([group_s(ordinal) for ordinal in range(100 * GROUPS)]).reshape(100, GROUPS)
        tail = float(batches.max(axis=1).mean() / mean_group_s())
        for staleness in args.staleness:
            free, exact = (update_s(args.updates, staleness, deterministic=value) for value in (False, True))
            rows.append(
                {"sigma": sigma, "staleness": staleness, "tail": tail, "free_s": free, "deterministic_s": exact}
            )
            print(
                f"| {sigma} | {staleness} | {tail:.2f} | {free:.3f} | {exact:.3f} | {exact / free:.2f}x |", flush=True
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
