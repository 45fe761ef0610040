"""Does the engine really overlap? Executors that compute for a known time, run with S = 1 and with S = 0.

    python benchmarks/overlap.py [--updates 20] [--repeats 3] [--json result.json]

Generator and trainer compute sha256 sums on one core each, as many as took the nominal time just before, alone; their
weights are those of the tiny model, really published and loaded. Asynchronous (max_staleness=1), an update should take as
long as the slowest part; synchronous (max_staleness=0, colocated), as long as all together. Each ratio is taken within one
run: against the nominal times, and against the parts as that run's own timeline shows them, which other programs on the
machine lengthen as much as the update. Exits with 1 when a median of the latter is above 1.10.
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

from pretending import GROUPS, SAMPLES, PretendedGenerator, PretendedTrainer, update_times  # beside this script

from llamarl import Job
from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.builders.trainer import build_trainer
from llamarl.config.file import load_config
from llamarl.executors.executor import Executor
from llamarl.messages import Report
from llamarl.types import PromptGroup

PROMISED = 1.10
SHAPES = {"generation-bound": (0.24, 0.06), "training-bound": (0.06, 0.24), "balanced": (0.16, 0.16)}
MODES = {
    "async": ["schedule.max_staleness=1"],
    "sync": ["schedule.max_staleness=0", "placement=colocated"],
}
WARM_UP = 3  # updates that are not counted: the line fills
SLICE_S = 0.005  # of a generator, between looks at its inbox
BLOCKS_PER_S, GENERATE_S, TRAIN_S = "OVERLAP_BLOCKS_PER_S", "OVERLAP_GENERATE_S", "OVERLAP_TRAIN_S"
BLOCK = bytes(16_384)


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


class BusyGenerator(PretendedGenerator):
    """Answers groups in turn, each after its share of the work of one update."""

    def __init__(self, honest: Executor) -> None:
        super().__init__(honest)
        self._queue: deque[PromptGroup] = deque()
        self._per_group = blocks(setting(GENERATE_S) / GROUPS)
        self._slice = min(self._per_group, blocks(SLICE_S))
        self._left = self._per_group

    @property
    def idle(self) -> bool:
        return not self._queue

    def take(self, group: PromptGroup) -> None:
        self._queue.append(group)

    def work(self) -> Iterable[Report]:
        now = min(self._slice, self._left)
        compute(now)
        self._left -= now
        if self._left:
            return ()
        self._left = self._per_group
        return [self.answer(self._queue.popleft())]


def busy_generator(site: BuildContext) -> Executor:
    return BusyGenerator(build_generator(site))


def busy_trainer(site: BuildContext) -> Executor:
    per_update = blocks(setting(TRAIN_S))
    return PretendedTrainer(build_trainer(site), lambda: compute(per_update))


def run_job(folder: Path, updates: int, mode: str) -> None:
    overrides = [
        f"schedule.updates={updates + WARM_UP}",
        f"schedule.groups_per_update={GROUPS}",
        f"schedule.samples_per_group={SAMPLES}",
        "generator.threads=1",
        "trainer.threads=1",
        "evaluate.prompts=0",
        *MODES[mode],
    ]
    job = Job(load_config(None, overrides), builders={"generator": busy_generator, "trainer": busy_trainer})
    job.run(folder)


def parts(folder: Path, start_s: float, end_s: float) -> list[float]:
    """Per executor, the seconds between the two that it was not waiting."""
    busy_s: dict[int, float] = {}
    for row in json.loads((folder / "timeline.json").read_text())["traceEvents"]:
        if row["ph"] == "X" and row["cat"] != "wait":
            first_s, last_s = row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6
            overlap_s = max(0.0, min(last_s, end_s) - max(first_s, start_s))
            busy_s[row["tid"]] = busy_s.get(row["tid"], 0.0) + overlap_s
    return list(busy_s.values())


def measure(shape: str, mode: str, updates: int) -> dict[str, float]:
    """One run: seconds from one update to the next once the line is full, and what they should have been."""
    generate_s, train_s = SHAPES[shape]
    os.environ.update({BLOCKS_PER_S: str(calibrate()), GENERATE_S: str(generate_s), TRAIN_S: str(train_s)})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        run_job(folder, updates, mode)
        start_s, end_s = update_times(folder)[WARM_UP - 1], update_times(folder)[-1]
        measured = [busy_s / updates for busy_s in parts(folder, start_s, end_s)]
    combine = max if mode == "async" else sum
    update_s = (end_s - start_s) / updates
    return {
        "update_s": update_s,
        "ratio": update_s / combine(measured),
        "ratio_nominal": update_s / combine([generate_s, train_s]),
    }


def print_table(rows: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    print("| shape | generate, s | train, s | mode | update, s | of nominal | of measured parts | each repeat |")
    print("|---|---:|---:|---|---:|---:|---:|---|")
    for (shape, mode), repeats in rows.items():
        generate_s, train_s = SHAPES[shape]
        print(
            f"| {shape} | {generate_s:.2f} | {train_s:.2f} | {mode} | {median(repeats, 'update_s'):.3f} "
            f"| {median(repeats, 'ratio_nominal'):.3f} | {median(repeats, 'ratio'):.3f} "
            f"| {', '.join(format(row['ratio'], '.3f') for row in repeats)} |"
        )


def median(repeats: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the ratios here too")
    args = parser.parse_args()
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for shape in SHAPES:
            for mode in MODES:
                rows.setdefault((shape, mode), []).append(measure(shape, mode, args.updates))
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps({" ".join(key): found for key, found in rows.items()}, indent=2) + "\n")
    sys.exit(max(median(repeats, "ratio") for repeats in rows.values()) > PROMISED)


if __name__ == "__main__":
    main()
