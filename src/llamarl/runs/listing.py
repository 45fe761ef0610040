"""All runs below a folder, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.config import Config
from llamarl.config.flat import flat_settings
from llamarl.errors import InputError
from llamarl.runs.run import Run, RunState, is_run

_MAX_DEPTH = 4  # folders below the given one


class RunEntry(Struct, frozen=True):
    """One run of a list."""

    folder: str
    state: RunState
    updates: int  # made so far
    of_updates: int  # that the job asks for
    score: float | None  # of the newest evaluation; None: none yet
    score_name: str  # "accuracy" or "mean reward"
    wall_s: float  # of the last start
    started: str  # date and time of the last start, UTC
    outcome: str  # how the last start ended; empty: it has not, or without a word
    settings: dict[str, Any]  # those in which the runs of the list differ


def find_runs(folder: Path) -> Iterator[Path]:
    """Run folders at or below a folder, sorted by path. Links to folders are not followed."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    yield from _below(folder, _MAX_DEPTH)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError:
            return  # a folder of somebody else's
        for path in inside:
            yield from _below(path, depth - 1)


def list_runs(folders: Sequence[Path]) -> tuple[list[RunEntry], list[str]]:
    """The runs, by the time of their last start, and a line for each folder that cannot be read."""
    read: list[tuple[Run, Config]] = []
    problems: list[str] = []
    for folder in folders:
        try:
            read.append((Run(folder), Run(folder).config))
        except InputError as error:
            problems.append(str(error))
    settings = [flat_settings(config) for _, config in read]
    differing = [key for key in dict.fromkeys(key for one in settings for key in one) if _differs(key, settings)]
    entries = [
        _entry(run, config, {key: one[key] for key in differing if key in one})
        for (run, config), one in zip(read, settings, strict=True)
    ]
    return sorted(entries, key=lambda entry: (entry.started, entry.folder)), problems


def _differs(key: str, settings: Sequence[dict[str, Any]]) -> bool:
    first, *others = (msgspec.json.encode(one.get(key)) for one in settings)
    return any(other != first for other in others)


def _entry(run: Run, config: Config, settings: dict[str, Any]) -> RunEntry:
    evaluations, summary, start = run.evaluations(), run.summary, run.last_start
    return RunEntry(
        folder=str(run.folder),
        state=run.state,
        updates=run.updates,
        of_updates=config.schedule.updates,
        score=evaluations[-1].accuracy if evaluations else None,
        score_name=config.score_name,
        wall_s=run.wall_s,
        started=start.at if start else "",
        outcome=summary.outcome if summary else "",
        settings=settings,
    )
