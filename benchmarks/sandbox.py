"""How many programs run in a second of one core, behind their walls, each in an interpreter of its own.

    python benchmarks/sandbox.py [RUNS]

Processor time of everything involved is counted (judge, worker, reaper, program), so that a busy machine does not change
the result; wall time stands beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from llamarl.config import RewardConfig, SandboxConfig
from llamarl.tasks.judge import Judge
from llamarl.tasks.sandbox.interpreter import find_interpreter
from llamarl.types import Problem

PROGRAM = "def double(n):\n    return 2 * n\nif __name__ == '__main__':\n    print(double(int(input())))"
SCRIPT = json.dumps([{"input": "21", "output": "42"}])
FUNCTION = json.dumps([{"call": "double", "args": [n], "expected": 2 * n} for n in range(10)])


class Rate(NamedTuple):
    what: str
    runs: int
    per_core_s: float
    per_wall_s: float


def measure(what: str, tests: str, runs: int) -> Rate:
    judge = Judge(RewardConfig(scorer="code", workers=1, retries=0), sandbox=SandboxConfig())
    judge.prepare()
    (worker,) = judge.worker_pids
    spent_s, start_s = time.process_time() + _process_time_s(worker), time.monotonic()
    for _ in range(runs):
        assert judge.score(PROGRAM, Problem("", tests)).reward == 1.0
    spent_s = time.process_time() + _process_time_s(worker) - spent_s
    wall_s = time.monotonic() - start_s
    judge.close()
    return Rate(what, runs, runs / spent_s, runs / wall_s)


def bare_interpreter(runs: int) -> Rate:
    """The same program without any walls: what is left is the price of Python itself."""
    command = [*find_interpreter("").command, "-c", PROGRAM]
    before, start_s = os.times(), time.monotonic()
    for _ in range(runs):
        subprocess.run(command, input=b"21", capture_output=True, check=True)
    after, wall_s = os.times(), time.monotonic() - start_s
    spent_s = sum(after[:4]) - sum(before[:4])
    return Rate("the interpreter alone, no walls", runs, runs / spent_s, runs / wall_s)


def _process_time_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")  # user, system, and the children's


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    rates = [
        measure("one input and output", SCRIPT, runs),
        measure("ten calls of a function", FUNCTION, runs),
        bare_interpreter(runs),
    ]
    print("| what | runs | per second of one core | per second of wall time |\n| --- | ---: | ---: | ---: |")
    for rate in rates:
        print(f"| {rate.what} | {rate.runs} | {rate.per_core_s:.1f} | {rate.per_wall_s:.1f} |")


if __name__ == "__main__":
    main()
