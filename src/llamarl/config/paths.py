"""Makes the paths in settings absolute, so that a run can be resumed from any working directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from llamarl.config.hub_names import name_on_hub
from llamarl.config.job import SHIPPED_MODELS, Config
from llamarl.plugins import split_reference

# Settings that may also be a name on the hub.
MODELS = (
    ("model", "path"),
    ("reference", "model"),
    ("reward_model", "path"),
    ("teacher", "path"),
    ("critic", "path"),
)
DATA = ("path", "test_path")  # of a task and of the parts of a mixture
_FILES = (("llm_judge", "rubric"), ("engine", "certs"), ("model", "adapter"), ("teacher", "adapter"))
_FUNCTIONS = (
    ("reward", "scorer"),
    ("algo", "loss"),
    ("conversation", "tool"),
    ("agent", "run"),
    ("agent", "environment"),
)


def with_absolute_paths(config: Config) -> Config:
    """The same settings with every relative path made absolute."""
    raw = msgspec.to_builtins(config)
    for section, name in MODELS:
        raw[section][name] = _absolute_unless_named(raw[section][name])
    for section, name in _FILES:
        raw[section][name] = _absolute(raw[section][name])
    for section, name in _FUNCTIONS:
        raw[section][name] = _absolute_function(raw[section][name])
    if "/" in raw["task"]["env_python"]:  # a bare name is looked up as any command
        raw["task"]["env_python"] = _absolute(raw["task"]["env_python"])
    raw["reward"]["combine"] = {_absolute_function(name): share for name, share in raw["reward"]["combine"].items()}
    for part in (raw["task"], *raw["task"]["parts"]):
        part.update({name: _absolute_unless_named(part[name]) for name in DATA})
    teachers = raw["teacher"]["by_name"]
    raw["teacher"]["by_name"] = {name: _absolute_unless_named(path) for name, path in teachers.items()}
    raw["sft"]["path"] = _absolute_unless_named(raw["sft"]["path"])
    return msgspec.convert(raw, Config)


def _absolute_unless_named(text: str) -> str:
    """The absolute path; the shipped model and names on the hub stay as they are."""
    return text if text in SHIPPED_MODELS or name_on_hub(text) else _absolute(text)


def _absolute(text: str) -> str:
    return str(Path(text).expanduser().absolute()) if text else text


def _absolute_function(text: str) -> str:
    found = split_reference(text)
    return f"{found[0].absolute()}:{found[1]}" if found else text
