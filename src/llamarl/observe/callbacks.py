"""Callbacks: the user's own code, called in the job's process while it runs, on every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.errors import ConfigError
from llamarl.observe.summary import Summary
from llamarl.plugins import describe_error, format_traceback

LOG = "callbacks"  # name of the log that tracebacks of callbacks go to


class StopTraining(Exception):
    """Raise it in a callback to end the job: the update under way is finished, and a snapshot is made to resume from."""


@dataclass(frozen=True)
class UpdateDone:
    """An update that counts: it is in the ledger on disk, and its kept rollouts can be read."""

    update: int  # number of the update; the first is 0
    updates: int  # number of updates that the job asks for
    metrics: Mapping[str, float]  # its row of metrics.jsonl
    timings: Mapping[str, float]  # figures that depend on the machine
    folder: Path  # the run folder; `llamarl.Run(folder)` reads it


@dataclass(frozen=True)
class EvaluationDone:
    """A version of the policy was asked all held-out problems."""

    version: int
    score: float
    score_name: str  # "accuracy" or "mean reward"
    folder: Path


class Callback:
    """Base class of callbacks; override what you need. All methods are called in the process that started the job, one at a
    time, and the job waits for them. See docs/reading.md for when they are called and what happens if one fails."""

    def on_start(self, folder: Path) -> None:
        """The job begins, or goes on, in this run folder."""

    def on_update(self, event: UpdateDone) -> None:
        """An update counts. Called once for each update that this start of the job makes, in order."""

    def on_evaluation(self, event: EvaluationDone) -> None:
        """An evaluation is done."""

    def on_end(self, summary: Summary) -> None:
        """The job has ended, also if it failed; its summary is written."""


class _Function(Callback):
    """A plain function, called on updates."""

    def __init__(self, function: Callable[[UpdateDone], Any]) -> None:
        self.function = function

    def on_update(self, event: UpdateDone) -> None:
        self.function(event)


AnyCallback = Callback | Callable[[UpdateDone], Any]


def checked_callbacks(callbacks: Iterable[AnyCallback]) -> tuple[Callback, ...]:
    """Callbacks as objects; ConfigError for anything else."""
    found: list[Callback] = []
    if isinstance(callbacks, Callback | str) or not isinstance(callbacks, Iterable):
        raise ConfigError("callbacks: must be a list of Callback objects or functions of an update: callbacks=[mine]")
    for one in callbacks:
        if isinstance(one, type) or not (isinstance(one, Callback) or callable(one)):
            told = f"the class {one.__name__}; give an object" if isinstance(one, type) else f"a {type(one).__name__}"
            raise ConfigError(f"callbacks: must be Callback objects or functions of an update, is {told}")
        found.append(one if isinstance(one, Callback) else _Function(one))
    return tuple(found)


class CallbackRunner:
    """Calls the callbacks of a job. One that raises is not called again: a note says so, its traceback is in the logs, and
    the job goes on. Updates wait until `deliver`, when they are on disk."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        folder: Path,
        *,
        updates: int,
        score_name: str,
        note: Callable[[str], None],
        log: Callable[[str, str], Path],
    ) -> None:
        self._callbacks, self._folder, self._updates = list(callbacks), folder, updates
        self._score_name, self._note, self._log = score_name, note, log
        self._heard: dict[int, tuple[Mapping[str, float], Mapping[str, float]]] = {}
        self._due: list[int] = []
        self._next = 0  # no update before this one is told again, as when it is made again after a death
        self.stop_requested = False

    def start(self) -> None:
        self._call("on_start", self._folder)

    def hear(self, update: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """The last role that trains has made an update."""
        if self._callbacks:
            self._heard[update] = (metrics, timings)

    def count(self, update: int) -> None:
        """The update is in the ledger."""
        if self._callbacks and update >= self._next:
            self._due.append(update)
            self._next = update + 1

    def deliver(self) -> None:
        """Tell of the updates that count, now that they are on disk."""
        due, self._due = self._due, []
        for update in due:
            metrics, timings = self._heard.get(update, ({}, {}))
            self._call("on_update", UpdateDone(update, self._updates, metrics, timings, self._folder))
        if due:
            self._heard = {update: heard for update, heard in self._heard.items() if update >= self._next}

    def evaluated(self, version: int, score: float) -> None:
        self._call("on_evaluation", EvaluationDone(version, score, self._score_name, self._folder))

    def end(self, summary: Summary) -> None:
        self._call("on_end", summary)

    def _call(self, method: str, argument: Any) -> None:
        for callback in list(self._callbacks):
            try:
                getattr(callback, method)(argument)
            except StopTraining as stop:
                self.stop_requested = True
                self._note(f"{_name(callback)} asked to stop{f': {stop}' if str(stop) else ''}")
            except Exception as error:  # the user's code: whatever it raises must not end the job
                self._callbacks.remove(callback)
                log = self._log(LOG, format_traceback(error) or describe_error(error))
                self._note(
                    f"NOTE: {_name(callback)} failed and is not called again: {describe_error(error)}; see {log}"
                )


def _name(callback: Callback) -> str:
    function = callback.function if isinstance(callback, _Function) else type(callback)
    return f"callback {getattr(function, '__qualname__', type(function).__name__)}"
