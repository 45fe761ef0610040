"""Makes the paths in settings absolute, so that a run can be resumed from any working directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from llamarl.config.job import SHIPPED_MODEL, Config
from llamarl.plugins import split_reference

_MODELS = (("model", "path"), ("reference", "model"), ("reward_model", "path"))
_FILES = (("task", "path"), ("task", "test_path"), ("llm_judge", "rubric"), ("engine", "certs"), ("model", "adapter"))
_FUNCTIONS = (("reward", "scorer"), ("algo", "loss"), ("conversation", "tool"))


def with_absolute_paths(config: Config) -> Config:
    """The same settings with every relative path made absolute."""
    raw = msgspec.to_builtins(config)
    for section, name in _MODELS:
        if raw[section][name] != SHIPPED_MODEL:
            raw[section][name] = _absolute(raw[section][name])
    for section, name in _FILES:
        raw[section][name] = _absolute(raw[section][name])
    for section, name in _FUNCTIONS:
        raw[section][name] = _absolute_function(raw[section][name])
    raw["reward"]["combine"] = {_absolute_function(name): share for name, share in raw["reward"]["combine"].items()}
    for part in raw["task"]["parts"]:
        part.update({name: _absolute(part[name]) for name in ("path", "test_path")})
    return msgspec.convert(raw, Config)


def _absolute(text: str) -> str:
    return str(Path(text).expanduser().absolute()) if text else text


def _absolute_function(text: str) -> str:
    found = split_reference(text)
    return f"{found[0].absolute()}:{found[1]}" if found else text
