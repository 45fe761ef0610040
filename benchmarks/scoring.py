"""How many answers are judged in a second of one core, by each kind of scorer.

    python benchmarks/scoring.py [MATH_FILE]

MATH_FILE is a JSON-lines file with MATH's fields, such as MATH-500's test.jsonl; without it, the extract of the tests.
Puzzles of reasoning-gym are judged where it is installed.
Processor time of this process and its workers is counted, so that a busy machine does not change the result; with one
worker, that is the time of one core.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple

from llamarl.config import DatasetConfig, RewardConfig, TaskConfig
from llamarl.tasks.data_files import read_rows
from llamarl.tasks.datasets import KINDS
from llamarl.tasks.examples import Example
from llamarl.tasks.judge import Judge
from llamarl.tasks.registry import make_task
from llamarl.types import Problem

ROOT = Path(__file__).parents[1]
EXTRACT = ROOT / "tests" / "data" / "math" / "train.jsonl"
REASONING = "We look at the problem step by step, and every step takes a line or two of text to explain. " * 12


class Answer(NamedTuple):
    completion: str
    problem: Problem


class Rate(NamedTuple):
    what: str
    answers: int
    per_core_s: float
    to_workers: int
    failed: int


def simple_answers(count: int) -> list[Answer]:
    """As GSM8K is answered: a page of text, then the number, right every second time."""
    chance = Random(0)
    golds = [chance.randrange(10_000) for _ in range(count)]
    return [Answer(f"{REASONING}\n#### {gold + n % 2}", Problem("", str(gold))) for n, gold in enumerate(golds)]


def math_answers(examples: Sequence[Example]) -> list[Answer]:
    """Each gold answer against itself, against itself in another spelling, and against another problem's answer."""
    chance = Random(0)
    golds = [example.answer for example in examples]
    answers = []
    for gold in golds:
        respelled = gold.replace("\\frac", "\\dfrac").replace("+", " + ").replace(",", ", ")
        for given in (gold, respelled, chance.choice(golds)):
            answers.append(Answer(f"{REASONING} So it is $\\boxed{{{given}}}$.", Problem("", gold)))
    return answers


def symbolic_answers(examples: Sequence[Example]) -> list[Answer]:
    """Only what needs algebra: an answer in another form, right or wrong."""
    golds = [example.answer for example in examples]
    return [Answer(f"$\\boxed{{({gold}) + {n % 2} x}}$", Problem("", gold)) for n, gold in enumerate(golds)]


def puzzle_answers(name: str, puzzles: int, samples: int = 8) -> list[Answer]:
    """Groups of answers to puzzles of a set of reasoning-gym, every second one right."""
    task = make_task(TaskConfig(kind="reasoning_gym", datasets={name: 1.0}, size=10_000), 0)
    problems = [task.problem(ordinal) for ordinal in range(puzzles)]
    return [
        Answer(f"{REASONING} <answer>{one.answer if n % 2 else 17}</answer>", one)
        for one in problems
        for n in range(samples)
    ]


def measure(what: str, settings: RewardConfig, answers: Sequence[Answer]) -> Rate:
    judge = Judge(settings, tuple({answer.problem.scorer for answer in answers}))
    judge.prepare()
    to_workers = failed = 0
    start_s = _spent_s(judge)
    for answer in answers:
        judge.ask(None, answer.completion, answer.problem)
        to_workers += judge.num_waiting
        while judge.num_pending:
            failed += sum(outcome.status != "ok" for _, outcome in judge.collect(5.0))
    spent_s = _spent_s(judge) - start_s
    judge.close()
    return Rate(what, len(answers), len(answers) / spent_s, to_workers, failed)


def _spent_s(judge: Judge) -> float:
    """Processor time so far of this process and of the workers with the children they have waited for."""
    return time.process_time() + sum(_process_time_s(pid) for pid in judge.worker_pids)


def _process_time_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")  # user, system, and the children's


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else EXTRACT
    examples = list(read_rows([path], lambda row: KINDS["math"].read(DatasetConfig(kind="math"), row)))
    own = ROOT / "examples" / "custom_reward.py"
    simple = simple_answers(20_000)
    rates = [
        *[
            measure(name, RewardConfig(scorer=name), simple)
            for name in ("exact", "numeric", "choice", "format", "length")
        ],
        measure("math, as answers come", RewardConfig(scorer="math", workers=1), math_answers(examples)),
        measure("math, algebra only", RewardConfig(scorer="math", workers=1), symbolic_answers(examples)),
        measure("regex", RewardConfig(scorer="regex", pattern=r"#### (\d+)", workers=1), simple[:300]),
        measure("FILE.py:FUNCTION", RewardConfig(scorer=f"{own}:score", workers=1), simple[:300]),
    ]
    if find_spec("reasoning_gym"):
        for name in ("chain_sum", "countdown", "spell_backward"):
            puzzled = RewardConfig(scorer="auto", workers=1)
            rates.append(measure(f"reasoning_gym, {name}", puzzled, puzzle_answers(name, 20)))
    print(
        "| scorer | answers | per second of one core | went to a worker | failed |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for rate in rates:
        print(f"| {rate.what} | {rate.answers:,} | {rate.per_core_s:,.0f} | {rate.to_workers:,} | {rate.failed} |")


if __name__ == "__main__":
    main()
