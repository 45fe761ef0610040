"""Does a long run stay small? Thousands of updates by executors that only pretend; memory and descriptors on the way.

    python benchmarks/long_run.py [--updates 5000] [--json result.json]

Controller, driver, ledger, GroupStore, snapshots and record are the real ones, in one process (`engine=inline`). Exits
with 1 when resident memory grows by more than 2% from one third of the run to its end, or descriptors grow at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from llamarl import Job
from llamarl.builders.context import BuildContext
from llamarl.config.file import load_config
from llamarl.executors.executor import Executor
from llamarl.messages import (
    BatchResult,
    GroupResult,
    LoadWeights,
    Message,
    PublishWeights,
    Report,
    SaveState,
    StateSaved,
    WeightsLoaded,
    WeightsPublished,
    WorkOnBatch,
    WorkOnGroup,
)
from llamarl.model.training_state import hash_files
from llamarl.observe.display import Progress
from llamarl.types import (
    Completion,
    CompletionGroup,
    PromptGroup,
    Rollout,
    RolloutGroup,
    VersionRun,
    floats_to_bytes,
    tokens_to_bytes,
)

PROMISED_GROWTH = 0.02
SAMPLES = 4
LENGTH = 64


class Pretender:
    """Answers at once, whatever its role is asked."""

    idle = True

    def __init__(self) -> None:
        self._version = 0

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case LoadWeights():
                self._version = message.version
                yield WeightsLoaded(message.version, 0)
            case WorkOnGroup(group=PromptGroup() as prompt):
                runs = (VersionRun(self._version, LENGTH),)
                answer = Completion(
                    tokens_to_bytes([1] * LENGTH), floats_to_bytes([0.0] * LENGTH), runs, truncated=False
                )
                yield GroupResult(CompletionGroup(prompt, (answer,) * SAMPLES))
            case WorkOnGroup(group=CompletionGroup() as answered):
                rollouts = tuple(Rollout(answer, 1.0) for answer in answered.completions)
                yield GroupResult(RolloutGroup(answered.prompt, rollouts))
            case WorkOnBatch():
                yield BatchResult(message.update, {"groups": float(len(message.groups)), "reward": 1.0})
            case PublishWeights():
                yield WeightsPublished(message.version, 0, changed=True)
            case SaveState():
                part = Path(message.folder) / "trainer"
                part.mkdir()
                (part / "state").write_bytes(bytes(10_000))
                yield StateSaved(message.version, hash_files(Path(message.folder), [part / "state"]))
            case _:
                raise AssertionError(message)

    def work(self) -> Iterable[Report]:
        return ()


def pretend(site: BuildContext) -> Executor:
    return Pretender()


class Meter:
    """A display that looks at the process instead of showing anything."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.rows: list[dict[str, float]] = []

    def progress(self, done: int, of: int) -> None:
        pass

    def update(self, snapshot: Progress) -> None:
        if snapshot.update % self._every == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.rows.append(
                {
                    "update": snapshot.update,
                    "memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                    "descriptors": len(os.listdir("/proc/self/fd")),
                }
            )

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = [
        "engine=inline",
        f"schedule.updates={args.updates}",
        "schedule.groups_per_update=4",
        f"schedule.samples_per_group={SAMPLES}",
        "evaluate.prompts=0",
    ]
    meter, started_s = Meter(args.updates // 15), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        builders = dict.fromkeys(("generator", "reward", "trainer"), pretend)
        Job(load_config(None, settings), builders=builders).run(Path(temporary) / "run", display=meter)
    print("| update | resident memory, MiB | descriptors |\n|---:|---:|---:|")
    for row in meter.rows:
        print(f"| {row['update']:.0f} | {row['memory_mib']:.1f} | {row['descriptors']:.0f} |")
    settled, last = meter.rows[len(meter.rows) // 3], meter.rows[-1]
    growth = last["memory_mib"] / settled["memory_mib"] - 1
    print(f"growth {growth:+.2%} of memory, {args.updates} updates in {time.monotonic() - started_s:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(meter.rows, indent=2) + "\n")
    sys.exit(growth > PROMISED_GROWTH or last["descriptors"] > settled["descriptors"])


if __name__ == "__main__":
    main()
