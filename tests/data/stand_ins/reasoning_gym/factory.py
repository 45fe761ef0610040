"""Sets by name: each makes entries by number and scores answers, as reasoning-gym's do."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any


@dataclass
class Settings:
    seed: int = 0
    size: int = 500
    max_operand: int = 9

    def validate(self) -> None:
        assert self.max_operand > 0, "max_operand must be positive"


class Sums:
    """Additions; the metadata hold a tuple, which JSON would turn into a list."""

    def __init__(self, config: Settings) -> None:
        self.config = config

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, idx: int) -> dict[str, Any]:
        rng = Random(self.config.seed + idx)
        a, b = rng.randint(0, self.config.max_operand), rng.randint(0, self.config.max_operand)
        return {"question": f"{a}+{b}=", "answer": str(a + b), "metadata": {"source_index": idx, "operands": (a, b)}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Full marks for the sum, a tenth for any other number."""
        a, b = entry["metadata"]["operands"]
        assert isinstance(entry["metadata"]["operands"], tuple)
        if answer is None or not answer.strip().lstrip("-").isdigit():
            return 0.0
        return 1.0 if int(answer) == a + b else 0.1


class Hanging(Sums):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if answer != entry["answer"]:
            time.sleep(60)
        return 1.0


class Evaluating(Sums):
    """Evaluates the answer, as some scorers of formulas do."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(eval(answer or "0") == int(entry["answer"]))  # noqa: S307, what a worker must refuse


class Writing(Sums):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        Path("written-by-a-scorer").write_text("here")
        return 1.0


class Raising(Sums):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        raise ValueError("always")


class Unsteady(Sums):
    """Other problems in every process, as sets have that go through a set of texts."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {**super().__getitem__(idx), "question": f"{os.getpid()}+0="}


class Slow(Sums):
    """Costly to make: full marks where another process has made it, none where it was made to score one answer."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {**super().__getitem__(idx), "metadata": {"made_by": os.getpid()}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(entry["metadata"]["made_by"] != os.getpid())


class Unmakeable(Sums):
    def __getitem__(self, idx: int) -> dict[str, Any]:
        raise RuntimeError("no such puzzle")


class Single(Sums):
    """All problems are the same one."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return super().__getitem__(0)


DATASETS: dict[str, tuple[type[Sums], type[Settings]]] = {
    "composite": (Sums, Settings),
    "sums": (Sums, Settings),
    "hanging": (Hanging, Settings),
    "evaluating": (Evaluating, Settings),
    "writing": (Writing, Settings),
    "raising": (Raising, Settings),
    "unsteady": (Unsteady, Settings),
    "slow": (Slow, Settings),
    "unmakeable": (Unmakeable, Settings),
    "single": (Single, Settings),
}


def create_dataset(name: str, **kwargs: Any) -> Sums:
    dataset, settings = DATASETS[name]
    config = settings(**kwargs)
    config.validate()
    return dataset(config)
