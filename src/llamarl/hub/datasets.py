"""Data by name: `openai/gsm8k`, at a revision or not, wherever a data file can be given; and where the built-in tasks lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from llamarl.config import DatasetConfig
from llamarl.config.hub_names import HubName, name_on_hub
from llamarl.errors import InputError
from llamarl.hub.snapshots import RepoSnapshot, open_snapshot
from llamarl.tasks.data_layout import README, DataFolder, is_data_file

Source = TypeVar("Source", bound=DatasetConfig)

_MAX_README_BYTES = 1 << 20
# By task.kind: where its problems lie if task.path is empty.
BUILT_IN = {
    "gsm8k": {"path": "openai/gsm8k", "config": "main"},
    "math": {"path": "DigitalLearningGmbH/MATH-lighteval", "config": "default", "test_path": "HuggingFaceH4/MATH-500"},
    "svamp": {"path": "ChilleD/SVAMP"},
}


def fetch_dataset(settings: Source, setting: str = "task") -> Source:
    """The same settings with datasets of the hub pinned to a commit, once the files that are read lie on this machine."""
    if not settings.path and settings.kind in BUILT_IN:
        own = {key: value for key, value in BUILT_IN[settings.kind].items() if not getattr(settings, key)}
        settings = replace(settings, **own)
    splits = (settings.split,) if settings.test_path else (settings.split, settings.test_split)
    path = _fetch(settings.path, splits, settings.config, f"{setting}.path")
    test_path = _fetch(settings.test_path, (settings.test_split,), "", f"{setting}.test_path")
    return replace(settings, path=path, test_path=test_path)


def _fetch(path: str, splits: Sequence[str], config: str, setting: str) -> str:
    name = name_on_hub(path) if path else None
    if name is None:
        return path
    snapshot = open_snapshot(name, "dataset", setting)
    folder = _layout(snapshot, name)
    first, *others = splits
    files = [*folder.check(first, config), *(file for split in others for file in folder.files(split, config))]
    snapshot.fetch(sorted(set(files)))
    snapshot.tell_if_unreachable()
    return str(snapshot.name)


def _layout(snapshot: RepoSnapshot, name: HubName) -> DataFolder:
    """Which files hold which split: from the README, which is fetched first, and the names of all files."""
    readme = ""
    if 0 < snapshot.sizes.get(README, 0) <= _MAX_README_BYTES:
        snapshot.fetch([README])
        readme = (snapshot.folder / README).read_text(encoding="utf-8", errors="replace")
    if not any(map(is_data_file, snapshot.sizes)) and any(file.endswith(".py") for file in snapshot.sizes):
        raise InputError(
            f"{snapshot.setting}: {name.repo} is made by a script of its own, which is not run; its pages on the hub may "
            "have a branch with Parquet files: @refs/convert/parquet"
        )
    return DataFolder(name.repo, snapshot.sizes, readme)
