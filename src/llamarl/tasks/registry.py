"""Tasks and scorers by the names that the config uses."""

from __future__ import annotations

from collections.abc import Callable

from llamarl.config import Reward
from llamarl.config import Task as TaskConfig
from llamarl.errors import ConfigError
from llamarl.plugins import is_reference, load_function
from llamarl.tasks.arithmetic import arithmetic_task
from llamarl.tasks.scorers import SCORERS, Scorer
from llamarl.tasks.task import Task

TASKS: dict[str, Callable[[TaskConfig, int], Task]] = {"arithmetic": arithmetic_task}


def make_task(settings: TaskConfig, seed: int) -> Task:
    return TASKS[settings.kind](settings, seed)


def make_scorer(settings: Reward) -> Scorer:
    if is_reference(settings.scorer):
        return load_function("reward.scorer", settings.scorer)
    if settings.scorer not in SCORERS:
        raise ConfigError(
            f"reward.scorer: unknown scorer '{settings.scorer}'; known: {', '.join(SCORERS)}, or FILE.py:FUNCTION"
        )
    return SCORERS[settings.scorer]
