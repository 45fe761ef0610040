"""Does the engine really overlap? Executors that compute for a known time, run with S = 1 and with S = 0.

    python benchmarks/overlap.py [--updates 20] [--repeats 3] [--json result.json]

Generator and trainer compute sha256 sums on one core each, as many as took the given time when nothing else ran; their
weights are those of the tiny model, really published and loaded. Asynchronous (max_staleness=1), an update should take as
long as the slower part; synchronous (max_staleness=0, colocated), as long as both together. All runs of one repeat follow
each other, each with its own calibration. Exits with 1 when a median ratio is more than 10% off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from llamarl import Job
from llamarl.build import Site, build_generator, build_trainer
from llamarl.configfile import load_config
from llamarl.executors.executor import Executor
from llamarl.messages import BatchResult, GroupResult, Message, Report, WorkOnBatch, WorkOnGroup
from llamarl.types import Completion, CompletionGroup, PromptGroup, VersionRun, floats_to_bytes, tokens_to_bytes

PROMISED = 1.10
SHAPES = {"generation-bound": (0.24, 0.06), "training-bound": (0.06, 0.24), "balanced": (0.16, 0.16)}
GROUPS, SAMPLES = 8, 4
WARM_UP = 3  # updates that are not counted: the line fills
SLICE_S = 0.005  # of a generator, between looks at its inbox
BLOCKS_PER_S, GENERATE_S, TRAIN_S = "OVERLAP_BLOCKS_PER_S", "OVERLAP_GENERATE_S", "OVERLAP_TRAIN_S"
BLOCK = bytes(16_384)
ANSWER = tokens_to_bytes([1])


def compute(num_blocks: int) -> None:
    for _ in range(num_blocks):
        hashlib.sha256(BLOCK)


def calibrate() -> float:
    """Blocks a second on a core of its own: the best of a few tries, since anything else only makes it slower."""
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        compute(4000)
        times.append(time.perf_counter() - started_s)
    return 4000 / min(times)


def setting(name: str) -> float:
    return float(os.environ[name])


def blocks(seconds: float) -> int:
    return round(seconds * setting(BLOCKS_PER_S))


class BusyGenerator:
    """Answers groups in turn, each after its share of the work of one update; loads weights as a real one."""

    def __init__(self, honest: Executor) -> None:
        self._honest = honest
        self._queue: deque[PromptGroup] = deque()
        self._per_group = blocks(setting(GENERATE_S) / GROUPS)
        self._slice = min(self._per_group, blocks(SLICE_S))
        self._left = self._per_group
        self._version = 0

    @property
    def idle(self) -> bool:
        return not self._queue

    def handle(self, message: Message) -> Iterable[Report]:
        if isinstance(message, WorkOnGroup) and isinstance(message.group, PromptGroup):
            self._queue.append(message.group)
            return ()
        self._version = getattr(message, "version", self._version)
        return self._honest.handle(message)

    def work(self) -> Iterable[Report]:
        now = min(self._slice, self._left)
        compute(now)
        self._left -= now
        if self._left:
            return ()
        self._left = self._per_group
        answer = Completion(ANSWER, floats_to_bytes([0.0]), (VersionRun(self._version, 1),), truncated=False)
        return [GroupResult(CompletionGroup(self._queue.popleft(), (answer,) * SAMPLES))]


class BusyTrainer:
    """Spends the time of an update without changing a weight; publishes and saves as a real one."""

    idle = True

    def __init__(self, honest: Executor) -> None:
        self._honest = honest
        self._per_update = blocks(setting(TRAIN_S))

    def handle(self, message: Message) -> Iterable[Report]:
        if not isinstance(message, WorkOnBatch):
            return self._honest.handle(message)
        compute(self._per_update)
        return [BatchResult(message.update, {"groups": float(len(message.groups))})]

    def work(self) -> Iterable[Report]:
        return ()


def busy_generator(site: Site) -> Executor:
    return BusyGenerator(build_generator(site))


def busy_trainer(site: Site) -> Executor:
    return BusyTrainer(build_trainer(site))


def update_s(updates: int, mode: list[str]) -> float:
    """Mean seconds from one update to the next, once the line is full."""
    overrides = [
        f"schedule.updates={updates + WARM_UP}",
        f"schedule.groups_per_update={GROUPS}",
        f"schedule.samples_per_group={SAMPLES}",
        "generator.threads=1",
        "trainer.threads=1",
        "evaluate.prompts=0",
        *mode,
    ]
    job = Job(load_config(None, overrides), builders={"generator": busy_generator, "trainer": busy_trainer})
    with tempfile.TemporaryDirectory() as folder:
        job.run(Path(folder) / "run")
        rows = map(json.loads, (Path(folder) / "run" / "timings.jsonl").read_text().splitlines())
        at_s = [row["at_s"] for row in rows if "update" in row]
    return float((at_s[-1] - at_s[WARM_UP - 1]) / updates)


def measure(updates: int) -> dict[str, float]:
    """One repeat: the six ratios, 1.0 being perfect."""
    found = {}
    for shape, (generate_s, train_s) in SHAPES.items():
        os.environ.update({BLOCKS_PER_S: str(calibrate()), GENERATE_S: str(generate_s), TRAIN_S: str(train_s)})
        overlapped_s = update_s(updates, ["schedule.max_staleness=1"])
        in_turn_s = update_s(updates, ["schedule.max_staleness=0", "placement=colocated"])
        found[f"{shape} async"] = overlapped_s / max(generate_s, train_s)
        found[f"{shape} sync"] = in_turn_s / (generate_s + train_s)
    return found


def print_table(repeats: list[dict[str, float]]) -> None:
    print("| shape | generate, s | train, s | S | should take, s | ratio, median | of each repeat |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for shape, (generate_s, train_s) in SHAPES.items():
        for mode, staleness, ideal_s in (("async", 1, max(generate_s, train_s)), ("sync", 0, generate_s + train_s)):
            ratios = [repeat[f"{shape} {mode}"] for repeat in repeats]
            print(
                f"| {shape} | {generate_s:.2f} | {train_s:.2f} | {staleness} | {ideal_s:.2f} "
                f"| {statistics.median(ratios):.3f} | {', '.join(f'{ratio:.3f}' for ratio in ratios)} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the ratios here too")
    args = parser.parse_args()
    repeats = [measure(args.updates) for _ in range(args.repeats)]
    print_table(repeats)
    if args.json:
        args.json.write_text(json.dumps(repeats, indent=2) + "\n")
    medians = [statistics.median(repeat[name] for repeat in repeats) for name in repeats[0]]
    sys.exit(not all(1 / PROMISED <= ratio <= PROMISED for ratio in medians))


if __name__ == "__main__":
    main()
