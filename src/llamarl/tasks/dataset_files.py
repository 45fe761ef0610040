"""The files that `task.path` and `task.test_path` stand for: a file, a folder, a pattern, or a dataset of the hub's cache."""

from __future__ import annotations

import glob
from pathlib import Path

from msgspec import Struct

from llamarl.config import Config, DatasetConfig
from llamarl.config.hub_names import pinned_folder
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.data_layout import README, DataFolder

_DEFAULTS = DatasetConfig()
_MAX_README = 1 << 20


class DatasetFiles(Struct, frozen=True):
    """Files of training and of test problems; either may be empty."""

    train: list[Path]
    test: list[Path]
    notes: tuple[str, ...] = ()  # for the user


def find_files(settings: DatasetConfig) -> DatasetFiles:
    if not settings.path:
        raise ConfigError(
            f"task.path: name the file, or the folder with train.jsonl, that {settings.kind} is read from, or a dataset on "
            "the hub"
        )
    path = pinned_folder(settings.path, "dataset") or Path(settings.path).expanduser()
    if path.is_dir():
        train, test = _in_folder(path, settings)
    else:
        train, test = _plain_files(path, settings)
    notes: tuple[str, ...] = ()
    if settings.test_path:
        test = _test_files(settings)
        if both := ", ".join(str(file) for file in test if file in train):
            notes = (f"NOTE: {both} of task.test_path is read by task.path too: it is trained on",)
    return DatasetFiles(train, [file for file in test if file not in train], notes)


def files_of(config: Config) -> list[Path]:
    """The files that a job reads prompts and rows from. A task that is given from Python reads what it likes."""
    files = set(find_files(config.sft.source).train if config.sft else [])
    for source in config.task.parts or [config.task]:
        if source.path and source.kind != "given":
            found = find_files(source)
            files.update(found.train, found.test)
    return sorted({file.absolute() for file in files})


def _plain_files(path: Path, settings: DatasetConfig) -> tuple[list[Path], list[Path]]:
    """A file with test.* beside it, or all files of a pattern."""
    for key in ("config", "split", "test_split"):
        if getattr(settings, key) != getattr(_DEFAULTS, key):
            raise ConfigError(
                f"task.{key}: cannot take effect, since task.path names files; give a folder or a dataset"
            )
    if path.is_file():
        beside = path.with_name(
            "test" + "".join(path.suffixes[-2:] if path.suffix in (".gz", ".zst") else [path.suffix])
        )
        return [path], [beside] if beside.is_file() else []
    if files := _matching(path):
        return files, []
    raise InputError(f"task.path: no file or folder {path}")


def _matching(pattern: Path) -> list[Path]:
    found = sorted(map(Path, glob.glob(str(pattern), recursive=True))) if glob.has_magic(str(pattern)) else []
    return [path for path in found if path.is_file()]


def _in_folder(folder: Path, settings: DatasetConfig) -> tuple[list[Path], list[Path]]:
    data = read_folder(folder, settings.path)
    train = data.files(settings.split, settings.config)
    test = data.files(settings.test_split, settings.config)
    if settings.split != _DEFAULTS.split or not (train or test):
        train = data.check(settings.split, settings.config)
    if settings.test_split != _DEFAULTS.test_split:
        test = data.check(settings.test_split, settings.config)
    return [folder / name for name in train], [folder / name for name in test]


def _test_files(settings: DatasetConfig) -> list[Path]:
    path = pinned_folder(settings.test_path, "dataset") or Path(settings.test_path).expanduser()
    if path.is_dir():
        return [path / name for name in read_folder(path, settings.test_path).check(settings.test_split)]
    files = [path] if path.is_file() else _matching(path)
    if not files:
        raise InputError(f"task.test_path: no file {path}")
    return files


def read_folder(folder: Path, shown: str) -> DataFolder:
    """The data files below a folder. `shown`: its name in errors."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    readme = folder / README
    text = ""
    if readme.is_file() and readme.stat().st_size <= _MAX_README:
        text = readme.read_text(encoding="utf-8", errors="replace")
    return DataFolder(shown, names, text)
