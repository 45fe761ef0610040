"""Which files of a folder hold a split of a dataset: as its README says, or by the files' names.

The same rules apply to a folder of this machine and to a dataset on the hub, whose files are only a list of names at first.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from llamarl.errors import ConfigError, InputError

README = "README.md"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".zst")
_SAME = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
_NOT_DATA = re.compile(
    r"(^|/)(\.|dataset_infos?\.json$|dataset_dict\.json$|state\.json$|config\.json$|package\.json$)", re.IGNORECASE
)

Splits = dict[str, tuple[str, ...]]  # split -> patterns of its files


def is_data_file(name: str) -> bool:
    """Whether a file's ending is one that can be read."""
    plain = name.lower()
    for packed in PACKED:
        plain = plain.removesuffix(packed)
    return plain.endswith(SUFFIXES)


class DataFolder:
    """The files of a folder, by config and split. `readme` is the text of its README.md; empty: it has none."""

    def __init__(self, place: str, names: Iterable[str], readme: str = "") -> None:
        self._place = place
        self._names = sorted(name for name in names if is_data_file(name) and not _NOT_DATA.search(name))
        self._configs = _configs_in(readme)

    def files(self, split: str, config: str = "") -> list[str]:
        """Names of the files of a split; empty if there is no such split."""
        if self._configs:
            return self._by_readme(split, self._chosen(config))
        names = self._names
        if config:
            names = [name for name in names if config in re.split(r"[/.]", name)]
            if not names:
                raise ConfigError(f"task.config: {self._place} has no config '{config}'; {self._told()}")
        return _by_names(names, split)

    def check(self, split: str, config: str = "") -> list[str]:
        """The same, but refuses a split that is not there."""
        if not self._names:
            raise InputError(f"task.path: {self._place} has no files that end with {', '.join(SUFFIXES)}")
        found = self.files(split, config)
        if not found:
            raise InputError(f"task.split: {self._place} has no split '{split}'; {self._told(config)}")
        return found

    def _chosen(self, config: str) -> Splits:
        known = ", ".join(self._configs)
        if config:
            if config not in self._configs:
                raise ConfigError(f"task.config: {self._place} has no config '{config}'; there are: {known}")
            return self._configs[config]
        if len(self._configs) > 1 and "default" not in self._configs:
            raise ConfigError(f"task.config: {self._place} has several configs; name one of: {known}")
        return self._configs.get("default") or next(iter(self._configs.values()))

    def _by_readme(self, split: str, patterns: Splits) -> list[str]:
        if "" in patterns:  # files without a split in the README
            return _by_names(self._matching(patterns[""]), split)
        return self._matching(patterns.get(split, ()))

    def _matching(self, patterns: Sequence[str]) -> list[str]:
        plain = [pattern.removeprefix("./") for pattern in patterns]
        return [name for name in self._names if any(fnmatch.fnmatchcase(name, pattern) for pattern in plain)]

    def _told(self, config: str = "") -> str:
        if self._configs:
            return f"there are: {', '.join(self._chosen(config)) or 'none'}"
        shown = ", ".join(self._names[:5]) + (" ..." if len(self._names) > 5 else "")
        return f"its data files are: {shown or 'none'}"


def _by_names(names: Sequence[str], split: str) -> list[str]:
    """The file that is named after the split, such as train.jsonl, else all with its name in their path. Where no file names
    any split, all of them are for training."""
    for name in sorted(names, key=lambda name: name.count("/")):
        if re.fullmatch(rf"(.*/)?{re.escape(split)}(\.[a-z]+){{1,2}}", name):
            return [name]
    found = [name for name in names if _names_split(name, split)]
    if not found and split == "train" and not any(_names_split(name, other) for name in names for other in _SAME):
        return list(names)
    return found


def _names_split(name: str, split: str) -> bool:
    words = "|".join(map(re.escape, _SAME.get(split, (split,))))
    return re.search(rf"(^|[/._ -])({words})([/._ -]|\d|$)", name, re.IGNORECASE) is not None


def _configs_in(readme: str) -> dict[str, Splits]:
    """The configs of the README's metadata; empty if it names none."""
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", readme, re.DOTALL)
    if not found:
        return {}
    try:
        meta = yaml.safe_load(found[1])
    except yaml.YAMLError:
        return {}
    entries = meta.get("configs") if isinstance(meta, dict) else None
    configs: dict[str, Splits] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and ("data_files" in entry or "data_dir" in entry):
            name = "default" if entry.get("default") is True else str(entry.get("config_name", "default"))
            splits = _splits_of(entry.get("data_files", "**"), str(entry.get("data_dir", "")).strip("/"))
            configs[name] = splits
            configs.setdefault(str(entry.get("config_name", name)), splits)
    return configs


def _splits_of(data_files: Any, base: str) -> Splits:
    def patterns(value: Any) -> tuple[str, ...]:
        texts = value if isinstance(value, list) else [value]
        return tuple(f"{base}/{text}" if base else str(text) for text in texts)

    if isinstance(data_files, Mapping):
        return {str(split): patterns(value) for split, value in data_files.items()}
    if isinstance(data_files, list) and all(isinstance(entry, Mapping) for entry in data_files):
        return {str(entry.get("split", "train")): patterns(entry.get("path")) for entry in data_files}
    return {"": patterns(data_files)}
