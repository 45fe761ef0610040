"""Turns an example into a problem: template, few-shot examples and chat messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError
from llamarl.tasks.examples import Example
from llamarl.tasks.task import Lazily
from llamarl.types import Problem, Turn

_MARK = "{prompt}"


class Prompting:
    """Makes problems. `shots` are the solved examples before each problem, the same for all."""

    def __init__(
        self,
        template: str,
        shots: Sequence[Example],
        scorer: str,
        *,
        chat: bool,
        system: str,
        teacher: str = "",
    ) -> None:
        if _MARK not in template:
            raise ConfigError(f"task.template: must hold {_MARK} where the problem goes")
        self._template, self._shots, self._scorer = template, shots, scorer
        self._chat, self._system, self._teacher = chat, system, teacher

    def problem(self, example: Example) -> Problem:
        if example.turns or self._chat:
            turns = self._turns(example)
            return Problem(
                example.question, example.answer, turns, self._scorer, example.columns, teacher=self._teacher
            )
        asked = [f"{self._fill(shot.question)} {shot.solution}" for shot in self._shots]
        prompt = "\n\n".join([*asked, self._fill(example.question)])
        return Problem(prompt, example.answer, (), self._scorer, example.columns, teacher=self._teacher)

    def _turns(self, example: Example) -> tuple[Turn, ...]:
        own = example.turns or (Turn("user", self._fill(example.question)),)
        system = (Turn("system", self._system),) if self._system and own[0].role != "system" else ()
        head, rest = (own[:1], own[1:]) if own[0].role == "system" else (system, own)
        shown = [
            turn
            for shot in self._shots
            for turn in (Turn("user", self._fill(shot.question)), Turn("assistant", shot.solution))
        ]
        return (*head, *shown, *rest)

    def _fill(self, question: str) -> str:
        return self._template.replace(_MARK, question)


def choose_shots(settings: DatasetConfig, train: Sequence[Example]) -> tuple[list[Example], Sequence[Example]]:
    """Return (shots, rest). The shots are always the same and are never used as problems."""
    if not settings.few_shot:
        return [], train
    if len(train) <= settings.few_shot:
        raise ConfigError(f"task.few_shot: only {len(train)} problems are there to take examples from")
    chosen = np.random.default_rng(0).permutation(len(train))[: settings.few_shot]
    rest = np.setdiff1d(np.arange(len(train)), chosen)
    return [train[index] for index in chosen], Lazily(train.__getitem__, rest)
