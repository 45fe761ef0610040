"""A job, as users see it: load, run, resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from llamarl.builders.context import Builder
from llamarl.builders.registry import BUILDERS
from llamarl.config import Config
from llamarl.config.file import check_config, load_config, read_config
from llamarl.config.in_vain import refuse_settings_in_vain
from llamarl.controller.default_line import default_line
from llamarl.controller.line import Line
from llamarl.errors import ConfigError
from llamarl.hub.resolve import with_commits_of, with_hub_files, with_hub_models, with_hub_rows
from llamarl.jobs.folder import open_new_run
from llamarl.jobs.prepare import prepare_job
from llamarl.jobs.resume import resume_job
from llamarl.jobs.run import run_job
from llamarl.observe.callbacks import AnyCallback, checked_callbacks
from llamarl.observe.display import Display, LastingConsole, Unwatched, make_display
from llamarl.observe.metric_logger import MetricLogger
from llamarl.observe.run_folder import CONFIG, clear_unbegun, dated_run_folder, no_run_to_resume
from llamarl.observe.summary import Summary
from llamarl.plugins import refuse_while_importing
from llamarl.tasks.from_python import with_scorer, with_task
from llamarl.tasks.task import Prompter


class Job:
    """`Job.load("job.yaml", ["trainer.lr=1e-4"]).run()` does what `llamarl train` does.

    To add a role, give a line of your own and a builder for it: `Job(config, line=..., builders={"critic": build})`.
    A scorer and a task may be given from Python: `Job(config, scorer=function, task=task)`; see docs/scorers.md. `callbacks`
    are called while the job runs: `Callback` objects, or functions of an `UpdateDone`; see docs/reading.md.
    `loggers` come beside those of the config: `Job(config, loggers=[MyLogger()])`; see docs/loggers.md.
    """

    def __init__(
        self,
        config: Config,
        *,
        line: Line | None = None,
        builders: Mapping[str, Builder] | None = None,
        scorer: Callable[..., Any] | None = None,
        task: Prompter | None = None,
        loggers: Sequence[MetricLogger] = (),
        callbacks: Sequence[AnyCallback] = (),
        recorded: Config | None = None,
    ) -> None:
        """`recorded`: the settings of the run that it goes on with, as `resume` has them."""
        refuse_while_importing()
        self.callbacks = checked_callbacks(callbacks)
        config, given = check_config(config), dict[str, Callable[..., Any]]()
        if scorer is not None:
            config, given = with_scorer(config, scorer)
        if task is not None:
            config = with_task(config, task)
        refuse_settings_in_vain(config, recorded)
        config = with_hub_files(config) if task is None else with_hub_rows(with_hub_models(config))
        self.line = line or default_line(config)
        self.builders = {**BUILDERS, **(builders or {})}
        self._prepared = prepare_job(config, self.line, self.builders, given, task, loggers)
        self.config = self._prepared.config

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        overrides: Sequence[str] = (),
        *,
        scorer: Callable[..., Any] | None = None,
        task: Prompter | None = None,
        loggers: Sequence[MetricLogger] = (),
        callbacks: Sequence[AnyCallback] = (),
    ) -> Job:
        """A job from a YAML file, or the default job, with settings such as `trainer.lr=1e-4` that replace the file's."""
        known = scorer is None and task is None  # else the constructor refuses settings in vain
        config = (load_config if known else read_config)(Path(path) if path else None, overrides)
        return cls(config, scorer=scorer, task=task, loggers=loggers, callbacks=callbacks)

    def run(self, folder: Path | str | None = None, *, display: Display | Literal["terminal"] | None = None) -> Summary:
        """Train to the end. The run folder records everything the job did, also when it fails. With `display="terminal"`, the
        terminal shows what `llamarl train` shows; by default nothing, and what needs attention is a warning of Python's."""
        with _shown(display) as shown:
            opened = open_new_run(self._prepared, Path(folder) if folder else dated_run_folder())
            return run_job(self._prepared, opened, shown, self.callbacks)

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        *,
        config: Config | None = None,
        overrides: Sequence[str] = (),
        line: Line | None = None,
        builders: Mapping[str, Builder] | None = None,
        scorer: Callable[..., Any] | None = None,
        task: Prompter | None = None,
        loggers: Sequence[MetricLogger] = (),
        callbacks: Sequence[AnyCallback] = (),
        display: Display | Literal["terminal"] | None = None,
    ) -> Summary:
        """Continue a run from its newest whole snapshot, with the settings it had, or equivalent ones. A finished run is left
        as it is, unless `schedule.updates` asks for more. A run that was killed before anything was recorded begins, if its
        `config` is given."""
        path = Path(folder)
        recorded = read_config(path / CONFIG) if (path / CONFIG).is_file() else None
        if recorded:
            config = with_commits_of(recorded, config or read_config(path / CONFIG, overrides))
        elif config is None or not clear_unbegun(path):
            raise no_run_to_resume(path)
        job = cls(
            config,
            line=line,
            builders=builders,
            scorer=scorer,
            task=task,
            loggers=loggers,
            callbacks=callbacks,
            recorded=recorded,
        )
        with _shown(display) as shown:
            if not recorded:
                shown.note(f"nothing is recorded in {path} yet: the run begins")
                return job.run(path, display=shown)
            return resume_job(job._prepared, path, shown, job.callbacks)


@contextmanager
def _shown(display: Display | Literal["terminal"] | None) -> Iterator[Display]:
    """The display that is asked for. One that is made here is closed here."""
    if display != "terminal":
        if isinstance(display, str):
            raise ConfigError(f"display: expected 'terminal' or a Display, got {display!r}")
        yield display or Unwatched()
        return
    made = make_display(LastingConsole(), quiet=False)
    try:
        yield made
    finally:
        made.close()
