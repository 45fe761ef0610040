"""Runs one logger in a thread of its own, behind a bounded queue, so that it can neither stop nor slow the job.

Every report is sent at most once. A file in the run folder keeps the run's id and, by kind of report, the first step that was
not sent yet. A resumed job goes on from there: reports of updates that are made again are left out, and metrics that never
arrived are read from the run folder.
"""

from __future__ import annotations

import os
import queue
import re
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamarl.observe.metric_logger import ACCURACY, Kind, LoggedRun, MetricLogger
from llamarl.observe.rows import Row, Rows
from llamarl.observe.run_folder import EVALUATIONS, METRICS
from llamarl.observe.samples import Decode, SampledRollout, sample_row
from llamarl.plugins import describe_error

MAX_WAITING = 10_000  # reports; a few KB each. Samples are larger: a tenth of the queue is theirs
LOGGERS = "loggers"  # folder in the run folder
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MAX_TRACEBACK = 4000  # characters


class LogReport(Struct, frozen=True):
    """One report of a job: numbers, or rollouts for a table of samples."""

    kind: Kind
    step: int  # an update, or the version that was evaluated
    values: Mapping[str, float] = {}
    samples: tuple[SampledRollout, ...] = ()


Marks = dict[Kind, int]  # first step that was not sent, by kind of report


class LoggerThread:
    """Sends reports to `logger`. `first_update` is the one that this start of the job begins with, `role` the role whose
    metrics are logged. `write_log` appends to a log file of the run and returns its path."""

    def __init__(
        self,
        name: str,
        logger: MetricLogger,
        run: LoggedRun,
        *,
        decode: Decode,
        role: str,
        first_update: int,
        write_log: Callable[[str, str], Path],
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.name, self._logger, self._run = name, logger, run
        self._decode, self._role, self._first_update, self._write_log = decode, role, first_update, write_log
        self._queue: queue.Queue[LogReport | str] = queue.Queue(max_waiting)
        self._notes: deque[str] = deque()
        self._marks: Marks = {}
        self._num_dropped = self._num_failed = self._num_sent = 0
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def put(self, report: LogReport) -> None:
        """Hand over a report; never blocks. Reports for which there is no room are dropped and counted."""
        if not self._thread.is_alive():
            return
        try:
            if report.samples and self._queue.qsize() > self._queue.maxsize // 10:
                raise queue.Full
            self._queue.put_nowait(report)
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                self._notes.append(f"logger {self.name} is too slow: it drops reports; the job goes on")

    def take_notes(self) -> Iterator[str]:
        """Yield what is to be told to the user since the last call."""
        while self._notes:
            yield self._notes.popleft()

    def end(self, outcome: str) -> None:
        """Ask the thread to finish. Old reports make room for this one."""
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put_nowait(outcome)
                return
            with suppress(queue.Empty):
                self._queue.get_nowait()
                self._num_dropped += 1

    def wait(self, deadline_s: float) -> bool:
        """Wait for the thread's end until `deadline_s`; whether it came."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        ended = not self._thread.is_alive()
        lost = self._num_dropped + self._num_failed
        if not ended:
            self._notes.append(
                f"logger {self.name} did not end in time (observe.wait_s) and is left behind; "
                f"about {self._queue.qsize() + lost} reports were not sent"
            )
        elif self._num_dropped or self._num_failed > 1:
            self._notes.append(
                f"logger {self.name}: {lost} of {lost + self._num_sent} reports were not sent "
                f"({self._num_dropped} dropped, {self._num_failed} failed)"
            )
        return ended

    # In the thread

    def _work(self) -> None:
        try:
            sent = read_marks(self._run.folder, self.name)
            self._marks = {**sent, **(self._logger.start(replace(self._run, sent=sent)) or {})}
            self._save_marks()
            for missing in self._missing():
                self._send(missing)
        except BaseException as error:
            self._tell("failed, and the job goes on without it", error)
            return
        while not isinstance(report := self._queue.get(), str):
            self._send(report)
        try:
            self._logger.finish(report)
        except BaseException as error:
            self._tell("failed at its end", error)

    def _missing(self) -> Iterator[LogReport]:
        """Yield metrics and evaluations of earlier starts that the logger lacks, such as all if it is new to the run."""
        if not self._first_update:
            return
        both = [*self._missing_evaluations(), *self._missing_metrics()]
        yield from sorted(both, key=lambda report: report.step)  # at the same step, the evaluation is first

    def _missing_metrics(self) -> Iterator[LogReport]:
        if self._next("metrics") < self._first_update:
            for row in Rows(self._run.folder / METRICS, Row):
                update, role = row.pop("update", -1), row.pop("role", "")
                if role == self._role and self._next("metrics") <= update < self._first_update:
                    yield LogReport("metrics", update, row)

    def _missing_evaluations(self) -> Iterator[LogReport]:
        for row in Rows(self._run.folder / EVALUATIONS, Row):
            if self._next("evaluations") <= row.get("version", -1) <= self._first_update and "accuracy" in row:
                yield LogReport("evaluations", row["version"], {ACCURACY: row["accuracy"]})

    def _send(self, report: LogReport) -> None:
        if report.step < self._next(report.kind):
            return
        try:
            self._marks[report.kind] = report.step + 1
            self._save_marks()  # before sending: rather a gap after a kill than a step twice
            self._hand_over(report)
            self._num_sent += 1
        except BaseException as error:
            self._num_failed += 1
            self._tell("could not log a report, and the job goes on", error, once=True)

    def _hand_over(self, report: LogReport) -> None:
        match report.kind:
            case "metrics":
                self._logger.log_metrics(report.step, report.values)
            case "evaluations":
                self._logger.log_evaluation(report.step, report.values)
            case _:
                rows = [sample_row(one, self._decode) for one in report.samples]
                self._logger.log_samples(report.kind, report.step, rows)

    def _next(self, kind: Kind) -> int:
        return self._marks.get(kind, 0)

    def _save_marks(self) -> None:
        path = marks_file(self._run.folder, self.name)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(msgspec.json.encode(self._marks))
        partial.replace(path)  # not synced: it need not survive a crash of the machine

    def _tell(self, what: str, error: BaseException, *, once: bool = False) -> None:
        if once and self._num_failed > 1:
            return
        told, log = without_secrets(describe_error(error)), f"logger-{self.name}"
        try:
            whole = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
            seen = f"; see {self._write_log(log, without_secrets(whole))}"
        except OSError:
            seen = ""
        self._notes.append(f"logger {self.name} {what}: {told}{seen}")


def marks_file(folder: Path, name: str) -> Path:
    return folder / LOGGERS / f"{name}.json"


def read_marks(folder: Path, name: str) -> Marks:
    """The marks of an earlier start; empty if there are none, or they are damaged."""
    try:
        return msgspec.json.decode(marks_file(folder, name).read_bytes(), type=Marks)
    except (OSError, msgspec.MsgspecError):
        return {}


def run_id(folder: Path) -> str:
    """The id under which loggers know this run: that of an earlier start, or a new one."""
    path = folder / LOGGERS / "run_id"
    with suppress(OSError):
        if re.fullmatch(r"[0-9a-f]{12}", found := path.read_text().strip()):
            return found
    made = secrets.token_hex(6)
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{made}\n")
    return made


def without_secrets(text: str) -> str:
    """The text without the values of environment variables that are named like keys, and without logins in addresses."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return _URL_LOGIN.sub("***", text)
