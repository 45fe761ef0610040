"""Makes tasks by their names in the config."""

from __future__ import annotations

from llamarl.config import Config, DatasetConfig, TaskConfig
from llamarl.errors import ConfigError
from llamarl.plugins import is_reference
from llamarl.tasks import arithmetic, reasoning_gym
from llamarl.tasks.custom_scorers import ScorerRequirements
from llamarl.tasks.datasets import KINDS, Examples, read_examples
from llamarl.tasks.judge import FALLBACK, Judge
from llamarl.tasks.mixture import Mixture
from llamarl.tasks.prompting import Prompting, choose_shots
from llamarl.tasks.reasoning_gym import make_reasoning_gym_tasks
from llamarl.tasks.task import Lazily, Prompter, Task
from llamarl.tasks.verifiers.tasks import read_tasks

_NOTHING = ScorerRequirements()


def make_task(settings: TaskConfig, seed: int, wanted: ScorerRequirements = _NOTHING) -> Prompter:
    """Make a task. `wanted` says what scorers need of the data besides prompts."""
    if settings.kind == "given":
        raise ConfigError(
            "task.kind: the task of this job was given from Python; give it again: Job.resume(folder, task=...)"
        )
    if settings.kind != "mixture":
        parts = _tasks_of(settings, seed, wanted, settings)
        return parts[0][0] if len(parts) == 1 else Mixture(parts, seed=seed)
    return Mixture(
        [
            (task, part.weight * share)
            for index, part in enumerate(settings.parts)
            for task, share in _tasks_of(part, seed + index, wanted, settings)
        ],
        seed=seed,
    )


def _tasks_of(
    source: DatasetConfig, seed: int, wanted: ScorerRequirements, asked: TaskConfig
) -> list[tuple[Task, float]]:
    """The tasks of one source, and their shares of its prompts."""
    if source.kind != "reasoning_gym":
        return [(make_single_task(source, seed, wanted, chat=asked.chat, system=asked.system), 1.0)]
    tasks = make_reasoning_gym_tasks(source, seed, wanted, chat=asked.chat, system=asked.system)
    whole = sum(weight for _, weight in tasks)
    return [(task, weight / whole) for task, weight in tasks]


def open_task(config: Config) -> Prompter:
    """Make the job's task. Loads its scorers to find the columns that they need."""
    if not any(map(is_reference, config.reward.combine or [config.reward.scorer])):
        return make_task(config.task, config.seed)
    judge = Judge.of(config, own_scorers(config.task), workers=1)
    try:
        return make_task(config.task, config.seed, judge.wanted)
    finally:
        judge.close()


def make_single_task(
    settings: DatasetConfig, seed: int, wanted: ScorerRequirements = _NOTHING, *, chat: bool = False, system: str = ""
) -> Task:
    examples = _examples(settings, wanted)
    shots, train = choose_shots(settings, examples.train)
    own_template, scorer = _habits(settings.kind)
    prompting = Prompting(
        settings.template or own_template, shots, scorer, chat=chat, system=system, teacher=settings.teacher
    )
    train_problems, held_out_problems, test_problems = (
        Lazily(prompting.problem, side) for side in (train, examples.held_out, examples.test)
    )
    return Task(train_problems, held_out_problems, seed=seed, test=test_problems, notes=examples.notes)


def own_scorers(settings: TaskConfig) -> tuple[str, ...]:
    """Return the task's scorers for `reward.scorer: auto`. No data are read."""
    kinds = [part.kind for part in settings.parts] or [settings.kind]
    return tuple(dict.fromkeys(_habits(kind)[1] for kind in kinds))


def _habits(kind: str) -> tuple[str, str]:
    if kind in ("given", "verifiers"):
        return "{prompt}" if kind == "verifiers" else "", FALLBACK
    if kind == "arithmetic":
        return arithmetic.TEMPLATE, arithmetic.SCORER
    if kind == "reasoning_gym":
        return reasoning_gym.TEMPLATE, reasoning_gym.SCORER
    return KINDS[kind].template, KINDS[kind].scorer


def _examples(settings: DatasetConfig, wanted: ScorerRequirements) -> Examples:
    if settings.kind == "verifiers":
        return read_tasks(settings)
    if settings.kind == "arithmetic":
        wanted.of({})  # raises if a scorer needs a column, as there are none
        return Examples(*arithmetic.additions(settings), ())
    return read_examples(settings, wanted)
