"""The tasks of an environment of verifiers, read once by a program in its own virtual environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError
from llamarl.tasks.datasets import Examples
from llamarl.tasks.examples import Example
from llamarl.tasks.task import is_held_out
from llamarl.tasks.verifiers.host import MARK
from llamarl.tasks.verifiers.program import TASK, host_command, host_variables, last_line

_READ_S = 3600.0  # an environment may download its data


def read_tasks(settings: DatasetConfig) -> Examples:
    """The tasks of an environment as problems, on their sides by the hash of what they hold. Raises ConfigError."""
    command, variables = host_command(settings, "tasks", str(settings.size)), host_variables(settings)
    try:
        done = subprocess.run(command, capture_output=True, env=variables, check=False, timeout=_READ_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"task.env: {settings.env} has not told its tasks within {_READ_S:g} s") from None
    except OSError as error:
        raise ConfigError(f"task.env_python: {settings.env_python} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise ConfigError(f"task.env: {settings.env} cannot be loaded: {last_line(done.stderr)}")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for row in _told(done.stdout):
        sides[is_held_out(_identity(row), settings.held_out)].append(_example(row))
    if not sides[0]:
        hint = "; task.held_out has taken all of them" if sides[1] else ""
        raise ConfigError(f"task.env: {settings.env} has no tasks to train on{hint}")
    return Examples(*sides, ())


def _example(row: dict[str, Any]) -> Example:
    prompt = row.get("prompt")
    question = prompt if isinstance(prompt, str) else json.dumps(row if prompt is None else prompt)
    answer = row.get("answer")
    told = "" if answer is None else str(answer)
    return Example(question, told, told, columns={TASK: row})


def _identity(row: dict[str, Any]) -> str:
    """What makes it another task: games often have the same prompt and another seed."""
    held = {key: value for key, value in row.items() if value is not None and key not in ("idx", "name")}
    return json.dumps(held, sort_keys=True)


def _told(output: bytes) -> Iterator[dict[str, Any]]:
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            yield msgspec.json.decode(line.removeprefix(MARK), type=dict[str, Any])
