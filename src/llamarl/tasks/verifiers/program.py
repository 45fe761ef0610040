"""How `host.py` is run by the Python of the other virtual environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llamarl.config import DatasetConfig

TASK = "task_data"  # the column of a problem that holds the task as the server wants it
HOST = Path(__file__).with_name("host.py")
_MAX_SAID = 300


def host_command(settings: DatasetConfig, action: str, argument: str) -> list[str]:
    python = str(Path(settings.env_python).expanduser())
    return [python, str(HOST), action, json.dumps(environment_config(settings)), argument]


def environment_config(settings: DatasetConfig) -> dict[str, Any]:
    """The settings of the environment, as its package reads them."""
    return {**settings.env_config, "taskset": {**settings.env_config.get("taskset", {}), "id": settings.env}}


def host_variables(settings: DatasetConfig) -> dict[str, str]:
    """Its own programs are found first, as if the virtual environment were active."""
    programs = str(Path(settings.env_python).expanduser().parent)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}


def last_line(said: bytes) -> str:
    """What a program said last, as one line: the end of a traceback is its reason."""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:_MAX_SAID] if lines else "it says nothing"
