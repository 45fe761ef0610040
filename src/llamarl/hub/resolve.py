"""Resolves all names on the hub in a job's settings, before anything starts: each becomes ORG/NAME@COMMIT, its files here."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from llamarl.config import Config
from llamarl.config.hub_names import name_on_hub, parse_hub_name
from llamarl.config.paths import DATA, MODELS
from llamarl.hub.datasets import BUILT_IN, fetch_dataset
from llamarl.hub.models import fetch_model


def with_hub_files(config: Config) -> Config:
    """The same settings with every model and dataset of the hub pinned to a commit, and on this machine."""
    config = with_hub_models(config)
    parts = tuple(fetch_dataset(part, f"task.parts[{index}]") for index, part in enumerate(config.task.parts))
    return with_hub_rows(replace(config, task=fetch_dataset(replace(config.task, parts=parts))))


def with_hub_rows(config: Config) -> Config:
    """The same, for the rows that are imitated."""
    if not config.sft:
        return config
    return replace(config, sft=replace(config.sft, path=fetch_dataset(config.sft.source, "sft").path))


def with_hub_models(config: Config) -> Config:
    """The same, for models alone."""
    config = replace(config, model=replace(config.model, path=fetch_model(config.model.path, "model.path")))
    if config.algo.reference_kl > 0:
        model = fetch_model(config.reference.model, "reference.model")
        config = replace(config, reference=replace(config.reference, model=model))
    if config.teacher:
        path = fetch_model(config.teacher.path, "teacher.path")
        by_name = {name: fetch_model(one, f"teacher.by_name.{name}") for name, one in config.teacher.by_name.items()}
        config = replace(config, teacher=replace(config.teacher, path=path, by_name=by_name))
    if config.has_critic:
        path = fetch_model(config.critic.path, "critic.path")
        config = replace(config, critic=replace(config.critic, path=path))
    path = fetch_model(config.reward_model.path, "reward_model.path")
    return replace(config, reward_model=replace(config.reward_model, path=path))


def with_commits_of(before: Config, now: Config) -> Config:
    """The settings of a run that is resumed, with the commits that it began with: a branch may have moved since. A revision
    that is asked for explicitly is kept, and then compared."""
    old, new = (msgspec.to_builtins(config) for config in (before, now))
    for section, key in MODELS:
        new[section][key] = _pinned(old[section][key], new[section][key])
    teachers, before_teachers = new["teacher"]["by_name"], old["teacher"]["by_name"]
    teachers.update({name: _pinned(before_teachers.get(name, ""), path) for name, path in teachers.items()})
    for old_part, new_part in _sources(old, new):
        if not new_part["path"] and new_part["kind"] == old_part["kind"] and new_part["kind"] in BUILT_IN:
            new_part |= {key: new_part[key] or old_part[key] for key in BUILT_IN[new_part["kind"]]}
        for key in DATA:
            new_part[key] = _pinned(old_part[key], new_part[key])
    new["sft"]["path"] = _pinned(old["sft"]["path"], new["sft"]["path"])
    return msgspec.convert(new, Config)


def _sources(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The task and the parts of its mixture, before and now."""
    return [(old["task"], new["task"]), *zip(old["task"]["parts"], new["task"]["parts"], strict=False)]


def _pinned(old: str, new: str) -> str:
    before, now = parse_hub_name(old), name_on_hub(new)
    same = before is not None and now is not None and before.repo == now.repo and not now.revision
    return old if same else new
