"""Seconds from `llamarl train` to its first finished update, on a machine's first start and on its next one.

    python benchmarks/first_update.py [CONFIG] [KEY=VALUE ...] [--starts 2] [--json result.json] [--stacks]
    python benchmarks/first_update.py examples/gsm8k_qwen.yaml model.path=...      # on a GPU
    python benchmarks/first_update.py                                              # the default job, on any machine

All starts share one new folder for compiled code, so the first finds nothing there and the next ones find what it left.
Phases come from the run folder (`timings.jsonl`, `spans.jsonl`) and overlap, since executors work side by side: each line
says when a phase began and ended, in seconds after the command. With --stacks, stacks of all processes are sampled during
the last start, and it tells for each what it did longest: the last function of ours on the stack, and what that called.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

STACKS = Path(__file__).parent / "stacks"
PACKAGE = os.path.dirname(str(importlib.util.find_spec("llamarl").origin)) + os.sep  # type: ignore[union-attr]
ROOT = os.path.dirname(PACKAGE.rstrip(os.sep)) + os.sep
_PLACES = 15  # of each process
SHORT = ["schedule.updates=2", "evaluate.prompts=0", "evaluate.every=0", "observe.rollouts_mb=0"]


@dataclass(frozen=True)
class Phase:
    """A stretch of the start, in seconds after the command."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Start:
    first_update_s: float
    phases: list[Phase]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def longest(folder: Path, began_s: float, until_s: float) -> Iterator[str]:
    """For each process, where its main thread was longest until the first update."""
    for file in sorted(folder.iterdir(), key=lambda one: int(one.name)):
        seconds, before_s = defaultdict[str, float](float), 0.0
        for line in file.read_text().splitlines():
            at, _, frames = line.partition("\t")
            at_s = float(at) - began_s
            if at_s <= until_s:
                seconds[_place(frames.split(";"))] += at_s - before_s if before_s else 0.0
            before_s = at_s
        if (whole_s := sum(seconds.values())) > 1:
            yield f"process {file.name}, {whole_s:.1f} s"
            ordered = sorted(seconds.items(), key=lambda item: -item[1])
            yield from (f"  {spent_s:6.2f} s  {place}" for place, spent_s in ordered[:_PLACES])


def _place(frames: list[str]) -> str:
    """Our last function on a stack, and the outermost one that it called. Frames of imports say nothing."""
    told = [frame for frame in frames if not frame.startswith("<frozen")]
    ours = max((at for at, frame in enumerate(told) if frame.startswith(PACKAGE)), default=-1)
    shown = told[max(0, ours) : ours + 3]
    return " > ".join(frame.removeprefix(ROOT).rpartition("site-packages/")[2] for frame in shown)


def measure(arguments: list[str], run: Path, environment: dict[str, str]) -> Start:
    began_s = time.time()
    command = [sys.executable, "-m", "llamarl", "train", *arguments, *SHORT, "--run", str(run), "--quiet"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the job failed: {done.stderr.strip()}")
    return start_of(run, began_s)


def start_of(run: Path, began_s: float) -> Start:
    """What a run folder tells of its first start; `began_s` is the time of the command."""
    timings = rows(run / "timings.jsonl")
    job_s = float(next(str(row["unix_s"]) for row in timings if "unix_s" in row)) - began_s
    first_s = job_s + float(next(str(row["at_s"]) for row in timings if row.get("update") == 0))
    phases = [Phase("imports and checks, until the job begins", 0.0, job_s), *spans(run, job_s)]
    return Start(first_s, [phase for phase in phases if phase.start_s < first_s])


def spans(run: Path, job_s: float) -> Iterator[Phase]:
    """For each executor and kind of work, from its first span to its last one before the first update ended."""
    updated = float(next(str(row["at_s"]) for row in rows(run / "timings.jsonl") if row.get("update") == 0))
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows(run / "spans.jsonl"):
        lanes = row.get("spans", {})
        assert isinstance(lanes, dict)
        for lane, some in lanes.items():
            for _, name, start_s, end_s in some:
                if start_s < updated:
                    first, last = found.get((lane, name), (start_s, end_s))
                    found[lane, name] = min(first, start_s), max(last, end_s)
    for (lane, name), (start_s, end_s) in sorted(found.items(), key=lambda item: item[1]):
        yield Phase(f"{lane}: {MEANING.get(name, name)}", job_s + start_s, job_s + end_s)


MEANING = {
    "start": "loads its model",
    "compile": "compiles its passes",
    "capture": "captures graphs",
    "slice": "works (samples, saves)",
    "PublishWeights": "publishes weights",
    "LoadWeights": "loads weights",
    "WorkOnGroup": "takes groups",
    "WorkOnBatch": "the update",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", metavar="CONFIG KEY=VALUE", help="as for `llamarl train`")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stacks", action="store_true", help="where every process was longest in the last start")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "XDG_CACHE_HOME": str(Path(scratch) / "cache")}
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            environment.pop(name, None)
        for number in range(1, args.starts + 1):
            sampled = Path(scratch) / "stacks" if args.stacks and number == args.starts else None
            if sampled:
                sampled.mkdir()
                paths = (str(STACKS), environment.get("PYTHONPATH", ""))
                environment |= {"LLAMARL_STACKS": str(sampled), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            began_s = time.time()
            start = measure(args.arguments, Path(scratch) / f"run-{number}", environment)
            found.append(start)
            print(f"start {number}: first update finished after {start.first_update_s:.1f} s")
            for phase in start.phases:
                print(f"  {phase.start_s:7.2f} to {phase.end_s:7.2f} s  {phase.name}", flush=True)
            if sampled:
                print("\n".join(longest(sampled, began_s, start.first_update_s)))
    if args.json:
        args.json.write_text(json.dumps([asdict(start) for start in found], indent=1))


if __name__ == "__main__":
    main()
