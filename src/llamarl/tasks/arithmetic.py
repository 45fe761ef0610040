"""Addition of two numbers: every pair of operands once, some of them held out."""

from __future__ import annotations

from llamarl.config import Task as TaskConfig
from llamarl.tasks.task import Task, is_held_out
from llamarl.types import Problem


def addition(a: int, b: int) -> Problem:
    return Problem(prompt=f"{a}+{b}=", answer=str(a + b))


def arithmetic_task(settings: TaskConfig, seed: int) -> Task:
    """a+b and b+a are held out together, so that neither gives the other away."""
    train: list[Problem] = []
    held_out: list[Problem] = []
    numbers = range(settings.max_operand + 1)
    for a in numbers:
        for b in numbers:
            kept = is_held_out(f"{min(a, b)}+{max(a, b)}", settings.held_out)
            (held_out if kept else train).append(addition(a, b))
    return Task(train, held_out, seed=seed)
