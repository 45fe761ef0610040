"""The builder of each role, and how another process finds it."""

from __future__ import annotations

import inspect

from llamarl.builders.agent import build_agents
from llamarl.builders.context import Builder
from llamarl.builders.critic import build_critic
from llamarl.builders.generator import build_generator
from llamarl.builders.reference import build_reference
from llamarl.builders.reward import build_reward
from llamarl.builders.reward_model import build_reward_model
from llamarl.builders.rows import build_rows
from llamarl.builders.teacher import build_teacher
from llamarl.builders.trainer import build_trainer
from llamarl.errors import ConfigError
from llamarl.plugins import load_function

BUILDERS: dict[str, Builder] = {
    "agent": build_agents,
    "critic": build_critic,
    "generator": build_generator,
    "reward": build_reward,
    "reward_model": build_reward_model,
    "rows": build_rows,
    "teacher": build_teacher,
    "trainer": build_trainer,
    "reference": build_reference,
}


def builder_reference(role: str, builder: Builder) -> str:
    """FILE.py:FUNCTION, by which another process finds the builder."""
    name = getattr(builder, "__qualname__", "")
    file = inspect.getsourcefile(builder)
    if not name.isidentifier() or file is None:
        raise ConfigError(
            f"line: the builder of '{role}' must be a function at the top of a file, so that a process can load it"
        )
    return f"{file}:{name}"


def load_builder(reference: str) -> Builder:
    ours = {builder_reference(role, builder): builder for role, builder in BUILDERS.items()}
    return ours.get(reference) or load_function("builder", reference)
