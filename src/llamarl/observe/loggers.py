"""The loggers of a job: which there are, whether they can be used, and one place that tells all of them.

A new logger is a file beside this one with a `MetricLogger`, and a row in `KNOWN`.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.config import Config, ObserveConfig
from llamarl.errors import ConfigError
from llamarl.observe.logger_thread import LoggerThread, LogReport, run_id
from llamarl.observe.metric_logger import ACCURACY, EVALUATION, TRAINING, LoggedRun, MetricLogger
from llamarl.observe.mlflow import MLflow
from llamarl.observe.run_folder import RunFolder
from llamarl.observe.samples import Decode, choose
from llamarl.observe.tensorboard import TensorBoard
from llamarl.observe.trackio import Trackio
from llamarl.observe.wandb import WandB, describe_missing_key
from llamarl.types import RolloutGroup


class KnownLogger(Struct, frozen=True):
    """A logger that the config can name. Its package and its extra have the same name."""

    make: Callable[[], MetricLogger]
    problem: Callable[[], str] = lambda: ""  # why it cannot be used, besides a missing package; empty: it can


KNOWN: Mapping[str, KnownLogger] = {
    "tensorboard": KnownLogger(TensorBoard),
    "wandb": KnownLogger(WandB, describe_missing_key),
    "trackio": KnownLogger(Trackio),
    "mlflow": KnownLogger(MLflow),
}


def check_loggers(settings: ObserveConfig) -> None:
    """Raise ConfigError if a logger is asked for that is unknown, not installed, or lacks what it needs."""
    for name in settings.logger_names:
        if name not in KNOWN:
            near = difflib.get_close_matches(name.lower(), KNOWN, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ConfigError(f"observe.loggers: no logger '{name}'; {hint}There are {', '.join(KNOWN)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"observe.loggers: the package of {name} is missing; pip install 'llamarl[{name}]'")
        if problem := KNOWN[name].problem():
            raise ConfigError(f"observe.loggers: {problem}")


class Loggers:
    """All loggers of a running job. Telling them never blocks and never fails."""

    def __init__(self, threads: Sequence[LoggerThread] = (), *, samples: int = 0, samples_every: int = 0) -> None:
        self._threads, self._samples, self._samples_every = threads, samples, samples_every

    @classmethod
    def start(
        cls,
        config: Config,
        folder: RunFolder,
        own: Sequence[MetricLogger],
        *,
        decode: Decode,
        role: str,
        first_update: int,
    ) -> Loggers:
        """Start the loggers that the config names, and the user's own. `first_update` is the first update of this start,
        `role` the role whose metrics are logged."""
        settings, made = config.observe, {name: KNOWN[name].make() for name in config.observe.logger_names}
        named = made | dict(zip(own_names(own), own, strict=True))
        if not named:
            return cls()
        run = LoggedRun(
            id=run_id(folder.path),
            name=settings.run_name or folder.path.resolve().name,
            project=settings.project,
            folder=folder.path.resolve(),
            settings=flat_settings(config),
            start=folder.run,
        )
        threads = [
            LoggerThread(name, one, run, decode=decode, role=role, first_update=first_update, write_log=folder.log)
            for name, one in named.items()
        ]
        return cls(threads, samples=settings.samples, samples_every=settings.samples_every)

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._put(LogReport("metrics", update, dict(values)))

    def evaluated(self, version: int, accuracy: float, groups: Sequence[RolloutGroup]) -> None:
        self._put(LogReport("evaluations", version, {ACCURACY: accuracy}))
        if self._samples:
            self._put(LogReport(EVALUATION, version, samples=choose(groups, self._samples)))

    def trained(self, update: int, groups: Sequence[RolloutGroup]) -> None:
        """Give samples of the rollouts that an update trains on, if it is time for a table."""
        if self._threads and self._samples and self._samples_every and update % self._samples_every == 0:
            self._put(LogReport(TRAINING, update, samples=choose(groups, self._samples)))

    def _put(self, report: LogReport) -> None:
        for thread in self._threads:
            thread.put(report)

    def take_notes(self) -> Iterator[str]:
        for thread in self._threads:
            yield from thread.take_notes()

    def finish(self, outcome: str, wait_s: float) -> None:
        """End all loggers, and wait for them at most `wait_s` in all."""
        deadline_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.end(outcome)
        for thread in self._threads:
            if not thread.wait(deadline_s):
                _left_behind.append(thread)


_left_behind: list[LoggerThread] = []  # did not end; what their packages do at exit may hang as well


def leave_loggers_behind(exit_code: int) -> None:
    """End this process at once if a logger was left behind: its package might wait for it at exit, without end."""
    if _left_behind:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def own_names(loggers: Sequence[MetricLogger]) -> list[str]:
    """Names of the user's own loggers: those of their classes, numbered where a class is there twice."""
    seen: Counter[str] = Counter()
    names = []
    for one in loggers:
        name = type(one).__name__
        seen[name] += 1
        names.append(f"{name}-{seen[name]}" if seen[name] > 1 else name)
    return names


def flat_settings(config: Config) -> dict[str, Any]:
    """All settings by their full names."""
    return dict(_flat(msgspec.to_builtins(config), ""))


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
