"""starts.jsonl: one row per start of a job, with its settings and the user's code.

A resumed job is compared with the last row, so that an edited config.yaml or a changed file is noticed, be it code or data.
Copies of the user's code are in `code/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import llamarl
from llamarl.config import Config
from llamarl.config.file import parse_config
from llamarl.errors import ConfigError, InputError
from llamarl.io.append_file import AppendFile
from llamarl.observe.rows import Rows, cut_rows
from llamarl.plugins import split_reference

STARTS = "starts.jsonl"
CODE = "code"
_END = 8 << 20  # bytes at each end of a data file that are looked at


class StartRecord(Struct, frozen=True):
    """One start of the job."""

    run: int  # number of the start; 0 is the first
    version: int  # policy version that it started from
    at: str  # date and time, UTC
    llamarl: str  # version of LlamaRL
    config: dict[str, Any]
    code: dict[str, str]  # maps the path of each user file to its copy in `code/`
    digest: str = ""  # of the config; empty in rows of earlier releases
    data: dict[str, str] = {}  # maps the path of each data file to what `_fingerprint` says of it


class Starts:
    """Reads and writes the starts.jsonl of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / STARTS

    def last(self) -> StartRecord | None:
        found = None
        for row in Rows(self._path, StartRecord):
            if row.digest not in ("", _digest(row.config)):
                continue  # a row with bytes missing may still be JSON, and even valid settings
            with suppress(ConfigError):
                parse_config(row.config)
                found = row
        return found

    def add(self, config: Config, data: Iterable[Path] = (), *, run: int, version: int, at: str) -> None:
        cut_rows(self._path, lambda row: True)  # removes an incomplete last line
        file = AppendFile(self._path)
        code = {str(path): self._copy(path) for path in own_files(config)}
        settings = msgspec.to_builtins(config)
        prints = {str(path): _fingerprint(path) for path in data}
        file.append_json(StartRecord(run, version, at, llamarl.__version__, settings, code, _digest(settings), prints))
        file.close()

    def changed_files(self, config: Config, data: Iterable[Path] = ()) -> Iterator[str]:
        """Yield a line for each file of code or data that has changed since the last start."""
        before = self.last()
        for path in data:
            known = before.data.get(str(path)) if before else None
            if known and known != _fingerprint(path):
                yield f"NOTE: {path} has changed since this run was last started, so its problems may be others from here on"
        for path in own_files(config):
            copy = before.code.get(str(path)) if before else None
            if copy and copy != _copy_name(path):
                kept = self._folder / CODE / copy
                yield f"NOTE: {path} has changed since this run was last started; what it was is in {kept}"

    def several_versions(self) -> list[str]:
        """Files of code and data that were not the same at all starts."""
        copies: dict[str, set[str]] = {}
        for row in Rows(self._path, StartRecord):
            for path, copy in (*row.code.items(), *row.data.items()):
                copies.setdefault(path, set()).add(copy)
        return sorted(path for path, seen in copies.items() if len(seen) > 1)

    def _copy(self, path: Path) -> str:
        name = _copy_name(path)
        (self._folder / CODE).mkdir(exist_ok=True)
        (self._folder / CODE / name).write_bytes(path.read_bytes())
        return name


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:16]


def own_files(config: Config) -> list[Path]:
    """Absolute paths of the files that settings name as FILE.py:FUNCTION."""
    found = map(split_reference, _texts(msgspec.to_builtins(config)))
    paths = {reference[0].absolute() for reference in found if reference}
    return sorted(path for path in paths if path.is_file())


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in the settings, including mapping keys: those of `reward.combine` name functions."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield key
            yield from _texts(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside)


def _fingerprint(path: Path) -> str:
    """Size and a digest of both ends: data may have gigabytes, and edits seldom leave all three alone."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            digest = hashlib.blake2b(file.read(_END), digest_size=8)
            file.seek(max(0, size - _END))
            digest.update(file.read(_END))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return f"{size}-{digest.hexdigest()}"


def _copy_name(path: Path) -> str:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return f"{path.stem}-{digest[:12]}.py"
