"""What judging by a scorer of one's own costs: for each answer in workers and in the reward's process, and for coroutines.

    python benchmarks/own_scorers.py

Wall time of a judge with two workers, after a first answer that is not counted. The functions do next to nothing, or sleep
for 0.2 s, so what is measured is all that is around them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from llamarl.config import RewardConfig
from llamarl.tasks.judge import Judge
from llamarl.types import Problem

OWN = """
import asyncio

def plain(completion, answer, prompt):
    return float(completion == answer)

def columns(completion, answer, difficulty):
    return difficulty * float(completion == answer)

def batched(completions, answer, **columns):
    return [float(one == other) for one, other in zip(completions, answer)]

async def sleeps(completion, answer):
    await asyncio.sleep(0.2)
    return float(completion == answer)
"""
GROUP = 8
PROBLEM = Problem("1+1=", "2", columns={"difficulty": 3.0})


class Case(NamedTuple):
    what: str
    function: str
    trusted: bool
    answers: int


CASES = (
    Case("one by one, in workers", "plain", False, 256),
    Case("a group at once, in workers", "batched", False, 256),
    Case("one by one, trusted", "plain", True, 20_000),
    Case("with a column, trusted", "columns", True, 20_000),
    Case("a group at once, trusted", "batched", True, 20_000),
    Case("sleeps 0.2 s, in workers", "sleeps", False, 128),
    Case("sleeps 0.2 s, trusted", "sleeps", True, 128),
)


def measure(case: Case, file: Path) -> float:
    """Seconds for all answers, asked in groups as a job asks them."""
    judge = Judge(RewardConfig(scorer=f"{file}:{case.function}", trusted=case.trusted, workers=2, concurrency=128))
    judge.score("2", PROBLEM)
    start_s, judged = time.perf_counter(), 0
    for group in range(case.answers // GROUP):
        judge.ask_all([(group, sample) for sample in range(GROUP)], ["2", "3"] * (GROUP // 2), PROBLEM)
        judged += len(judge.collect())
    while judge.num_pending:
        judged += len(judge.collect(1.0))
    assert judged == case.answers
    spent_s = time.perf_counter() - start_s
    judge.close()
    return spent_s


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "own.py"
        file.write_text(OWN)
        print("| scorer | answers | all of them | each |\n| --- | ---: | ---: | ---: |")
        for case in CASES:
            spent_s = measure(case, file)
            each_us = spent_s / case.answers * 1e6
            print(f"| {case.what} | {case.answers:,} | {spent_s:.2f} s | {each_us:,.0f} us |")


if __name__ == "__main__":
    main()
