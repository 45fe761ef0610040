"""Checks that every scorer accepts its own gold answers: scores a whole data folder and lists the refusals.

    LLAMARL_DATA=FOLDER python scripts/check_gold.py

FOLDER has gsm8k/{train,test}.jsonl, math/train.jsonl, math500/test.jsonl and svamp.jsonl (or easy/svamp.jsonl). Each answer
is given as a model would give it: as the worked solution, and in a box.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llamarl.config import DatasetConfig, RewardConfig
from llamarl.tasks.data_files import read_rows
from llamarl.tasks.datasets import KINDS
from llamarl.tasks.examples import Example
from llamarl.tasks.extract import final_answer
from llamarl.tasks.judge import Judge
from llamarl.types import Problem

MIN_SHARE = 0.995  # share of the answers that must be accepted
FILES = {
    "gsm8k": ["gsm8k/train.jsonl", "gsm8k/test.jsonl"],
    "svamp": ["svamp.jsonl", "easy/svamp.jsonl", "svamp/train.jsonl"],
    "math": ["math/train.jsonl", "math500/test.jsonl"],
}


class Refusal(NamedTuple):
    kind: str
    way: str
    answer: str
    reason: str


class Report(NamedTuple):
    kind: str
    file: str
    way: str
    num_answers: int
    refused: list[Refusal]

    @property
    def share(self) -> float:
        return 1 - len(self.refused) / self.num_answers


def ways(example: Example) -> dict[str, str]:
    return {"solution": example.solution, "boxed": f"So the answer is $\\boxed{{{example.answer}}}$."}


def data_files(folder: Path) -> Iterator[tuple[str, str, list[Example], Judge]]:
    """Yield kind, name and rows of each file that exists, and a judge for its answers."""
    for kind, files in FILES.items():
        judge = Judge(RewardConfig(scorer=KINDS[kind].scorer))
        judge.prepare()
        for file in files:
            if (folder / file).is_file():
                settings = DatasetConfig(kind=kind)  # type: ignore[arg-type]
                rows = read_rows([folder / file], lambda row: KINDS[kind].read(settings, row))  # noqa: B023, used at once
                yield kind, file, list(rows), judge
        judge.close()


def check(folder: Path) -> Iterator[Report]:
    for kind, file, examples, judge in data_files(folder):
        yield from check_file(kind, file, examples, judge)


def check_file(kind: str, file: str, examples: list[Example], judge: Judge) -> Iterator[Report]:
    for way in ("solution", "boxed"):
        for number, example in enumerate(examples):
            judge.ask(number, ways(example)[way], Problem(example.question, example.answer))
        refused = []
        while judge.num_pending:
            for key, outcome in judge.collect(1.0):
                if outcome.status != "ok" or outcome.reward != 1.0:
                    assert isinstance(key, int)
                    read_as = final_answer(ways(examples[key])[way], "auto", formulas=kind == "math")
                    refused.append(Refusal(kind, way, examples[key].answer, outcome.reason or f"read as {read_as!r}"))
        yield Report(kind, file, way, len(examples), refused)


def main() -> None:
    if "LLAMARL_DATA" not in os.environ:
        sys.exit("LLAMARL_DATA: name the folder with the data")
    worst = 1.0
    for report in check(Path(os.environ["LLAMARL_DATA"])):
        worst = min(worst, report.share)
        print(f"{report.file:22} as {report.way:8}  {report.num_answers:6} answers  accepted {report.share:.2%}")
        for refusal in report.refused:
            print(f"    refused {refusal.answer!r}: {refusal.reason}")
    sys.exit(worst < MIN_SHARE)


if __name__ == "__main__":
    main()
