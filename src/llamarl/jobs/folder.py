"""Opening the folder of a run, and recording each start of its job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from llamarl.config import Config
from llamarl.config.file import config_to_yaml
from llamarl.config.paths import with_absolute_paths
from llamarl.controller.events import Began, Resumed
from llamarl.engine.group_store import GroupStore
from llamarl.errors import InputError
from llamarl.jobs.prepare import PreparedJob
from llamarl.observe.rollout_log import ROLLOUTS, TOKENIZER
from llamarl.observe.run_folder import RunFolder, replace_file
from llamarl.observe.starts import Starts
from llamarl.observe.summary import Tally
from llamarl.tasks.dataset_files import files_of


@dataclass(frozen=True)
class OpenRun:
    """An open run folder, and the state that the job begins with."""

    folder: RunFolder
    store: GroupStore
    begin: Began | Resumed
    tally: Tally
    drop_reasons: Mapping[int, str]  # of groups that were dropped by earlier starts and not forgotten yet


def open_new_run(job: PreparedJob, path: Path) -> OpenRun:
    with one_line_on_failure(path):
        settings, updates = job.config.observe, job.config.schedule.updates
        folder = RunFolder.create(path, job.training_roles, settings=settings, updates=updates)
        with closed_on_failure(folder.close):
            record_start(folder, job.config, version=0)
            return OpenRun(folder, GroupStore(folder.groups), Began(), Tally(), {})


def record_start(folder: RunFolder, config: Config, version: int) -> None:
    config, at = with_absolute_paths(config), datetime.now(UTC).isoformat(timespec="seconds")
    folder.write_config(config_to_yaml(config))
    Starts(folder.path).add(config, files_of(config), run=folder.run, version=version, at=at)
    if config.observe.rollouts_mb:
        _copy_tokenizer(config, folder.path / ROLLOUTS / TOKENIZER)


def _copy_tokenizer(config: Config, to: Path) -> None:
    """Rollouts are kept as tokens; this makes texts of them, also when the model is gone."""
    if not to.exists():
        replace_file(to, (config.model_folder / TOKENIZER).read_bytes())


@contextmanager
def closed_on_failure(close: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):  # on a full disk closing fails too, and the first error says more
            close()
        raise


@contextmanager
def one_line_on_failure(folder: Path) -> Iterator[None]:
    """Turn an OSError, such as that of a full disk or a read-only folder, into one line for the user."""
    try:
        yield
    except OSError as error:
        raise InputError(f"--run {folder}: cannot be written: {error.strerror}: {error.filename or ''}") from None
