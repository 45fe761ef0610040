"""A run folder has one owner at a time, also while that one is frozen; who has lost it stops."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import llamarl
from helpers.killing import TINY, KillAt, Killed
from helpers.outside import RunningJob
from helpers.warm import WarmProcess

from llamarl import Job
from llamarl.builders.context import BuildContext
from llamarl.builders.trainer import build_trainer
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import InputError, JobFailed
from llamarl.executors.executor import Executor
from llamarl.messages import Message, WorkOnBatch
from llamarl.observe.run_lock import LOCK, RunLock
from llamarl.observe.summary import Summary

SETTINGS = [*TINY, "evaluate.prompts=0", "snapshots.every=2"]


def inline(*settings: str) -> Any:
    return load_config(None, [*SETTINGS, "engine=inline", "schedule.updates=6", *settings])


def started(folder: Path) -> RunningJob:
    job = RunningJob(folder, [*SETTINGS, "engine=local", "schedule.updates=1000"], start=WarmProcess)
    deadline_s = time.monotonic() + 60
    while not (folder / "snapshots" / "2").is_dir():
        assert job.running and time.monotonic() < deadline_s
        time.sleep(0.02)
    return job


def test_a_second_owner_is_refused_while_the_first_works_sleeps_and_wakes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = started(folder)
    try:
        for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT):
            os.kill(job.pid, number)
            done = llamarl("train", "--run", folder, "--resume")
            assert done.code == 2
            assert f"process {job.pid} on " in done.err and done.err.count("\n") == 1
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(60) == 0
    finally:
        job.end()
    assert audit(read_ledger(folder / "ledger")).consistent
    made = max(int(path.name) for path in (folder / "snapshots").iterdir())
    assert Job.resume(folder, overrides=[f"schedule.updates={made + 2}"]).outcome == "finished"
    assert audit(read_ledger(folder / "ledger")).clean


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    job = started(tmp_path / "run")
    job.end()
    RunLock(tmp_path / "run").release()


class Meddler:
    """A trainer during whose update somebody else does something to the run folder."""

    def __init__(self, trainer: Executor, meddle: Any) -> None:
        self._trainer, self._meddle = trainer, meddle

    @property
    def idle(self) -> bool:
        return self._trainer.idle

    def handle(self, message: Message) -> Any:
        if isinstance(message, WorkOnBatch) and message.update == 3:
            self._meddle()
        return self._trainer.handle(message)

    def work(self) -> Any:
        return self._trainer.work()


@pytest.mark.parametrize("how", ["lock removed", "taken over"])
def test_a_job_that_lost_its_folder_stops_and_the_other_one_is_clean(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"

    def meddle() -> None:
        (folder / LOCK).unlink()
        if how == "taken over":
            RunLock(folder).release()

    def build(context: BuildContext) -> Executor:
        return Meddler(build_trainer(context), meddle)

    reason = "is gone, so another job may be at work" if how == "lock removed" else "has taken over"
    with pytest.raises(JobFailed, match=reason) as failed:
        Job(inline(), builders={"trainer": build}).run(folder)
    assert failed.value.exit_code == 3
    assert Job.resume(folder).outcome == "finished"
    assert audit(read_ledger(folder / "ledger")).clean


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    lock = RunLock(tmp_path)
    assert "this file system has no locks" in lock.warning
    lock.check()
    lock.release()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        Job(inline(), builders={"trainer": KillAt(3)}).run(folder)
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(folder) in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=r"cannot be written: Read-only file system: .*/lock$"):
        Job.resume(folder)


# Ctrl-C


def press_ctrl_c(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


class Interrupting(Meddler):
    """Ctrl-C is pressed during update 3."""

    def __init__(self, trainer: Executor, times: int) -> None:
        super().__init__(trainer, lambda: press_ctrl_c(times))


def interrupted(folder: Path, times: int) -> Summary:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return Job(inline(), builders={"trainer": lambda context: Interrupting(build_trainer(context), times)}).run(
            folder
        )
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_makes_a_snapshot(tmp_path: Path) -> None:
    assert interrupted(tmp_path / "run", 1).outcome == "interrupted"
    assert (tmp_path / "run" / "snapshots" / "4").is_dir()
    assert Job.resume(tmp_path / "run").updates == 6


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "run", 2)
    assert not (tmp_path / "run" / "snapshots" / "4").exists()
    assert Job.resume(tmp_path / "run").updates == 6
