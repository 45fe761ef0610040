"""Scorers and tasks that are passed from Python, as Job(config, scorer=..., task=...), and their names in the settings."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from llamarl.config import Config
from llamarl.errors import ConfigError
from llamarl.plugins import reference_to
from llamarl.tasks.custom_scorers import Function
from llamarl.tasks.judge import FALLBACK
from llamarl.tasks.task import Prompter
from llamarl.types import Problem


def with_scorer(config: Config, scorer: Function) -> tuple[Config, dict[str, Function]]:
    """Return the settings with this scorer, and the functions that stay in this process. On `inline` that may be any
    callable; processes of other engines load the function from its file."""
    if isinstance(scorer, type):
        raise ConfigError(f"scorer: must be a function, is the class {scorer.__name__}; give an object of it")
    if not callable(scorer):
        raise ConfigError(f"scorer: must be a function, is a {type(scorer).__name__}")
    reference = reference_to(scorer)
    inline = config.engine.kind == "inline"
    if not reference and not inline:
        raise ConfigError(
            f"scorer: with engine={config.engine.kind} it must be a function at the top of a .py file, or an object that "
            f"such a file holds, so that another process can load it; {_name(scorer)} is none. Move it there, or set "
            "engine=inline"
        )
    name = reference or f"python:{_name(scorer)}"
    if config.reward.combine or config.reward.scorer not in ("auto", name):
        raise ConfigError("reward.scorer: is set, and a scorer is given from Python; leave one of them out")
    chosen = replace(config, reward=replace(config.reward, scorer=name))
    return chosen, {name: scorer} if inline else {}


def with_task(config: Config, task: Prompter) -> Config:
    """Return the settings of a job with this task. For `reward.scorer: auto`, the first problem names the scorer of all."""
    for method in ("problem", "evaluation"):
        if not callable(getattr(task, method, None)):
            raise ConfigError(
                f"task: {type(task).__name__} has no method '{method}'; see Prompter in llamarl.tasks.task"
            )
    first = task.problem(0)
    if not isinstance(first, Problem):
        raise ConfigError(f"task: problem(0) must be a llamarl.types.Problem, is a {type(first).__name__}")
    try:
        msgspec.msgpack.encode(first)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"task: problem(0) cannot be sent to other processes: {error}") from None
    scorer = config.reward.scorer
    if scorer == "auto" and not config.reward.combine:
        scorer = first.scorer or FALLBACK
    return replace(config, task=replace(config.task, kind="given"), reward=replace(config.reward, scorer=scorer))


def _name(function: Function) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
