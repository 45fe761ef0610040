"""A job started from the command line and disturbed from outside, as by an operator, a kernel or a power cut."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CONTROLLER = "controller"
NUM_EXECUTORS = 3
_LOOK_S = 0.005
_STATE_S = 2.0  # longest wait for a state
ROBUST = ("schedule.max_restarts=20", "schedule.max_attempts=50", "snapshots.every=5")  # for frequent kills


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def executors(controller: int) -> dict[str, int]:
    """Maps each executor, such as `generator-0`, to its pid. Executors are recognized by the log that they write."""
    found = {}
    for server in children(controller):
        for pid in children(server):
            with suppress(OSError):
                log = Path(os.readlink(f"/proc/{pid}/fd/1"))
                if log.suffix == ".log":
                    found[log.stem] = pid
    return found


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str]], Process]


def fresh(args: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Run `llamarl ARGS` in a new interpreter."""
    return subprocess.Popen([sys.executable, "-m", "llamarl.cli", *args], env=environment)


class RunningJob:
    """`llamarl train` as a process, which is resumed when it has been killed."""

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        start: Start = fresh,
    ) -> None:
        """Start the job. `environment` is added to this process's, for the first start only."""
        self.folder, self._start_process = folder, start
        self._process = self._start(*settings, environment=environment)

    def _start(self, *args: str, environment: Mapping[str, str] | None = None) -> Process:
        command = ["train", "--run", str(self.folder), "--quiet", *args]
        return self._start_process(command, {**os.environ, **(environment or {})})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill_and_resume(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._start("--resume")

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def end(self) -> None:
        if self.running:
            self._process.kill()
            self._process.wait()

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    # States that can be recognized from outside

    def is_in(self, state: str, victim: int) -> bool:
        match state:
            case "saving":
                return any((self.folder / "snapshots").glob(".*.partial"))
            case "publishing":  # it follows the sync of an update's records
                newest = max((path.stat().st_mtime for path in (self.folder / "ledger").iterdir()), default=0.0)
                return time.time() - newest < 0.02
            case "busy":
                return process_state(victim) == "R"
            case _:
                return process_state(victim) == "S"


def process_state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


STATES = ("idle", "busy", "publishing", "saving")


@dataclass
class Disturber:
    """Kills or stops a process every `every_s` seconds while a job runs, chosen by seed."""

    seed: int
    every_s: float
    controller_share: float = 0.1
    stop_share: float = 0.25
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def disturb(self, job: RunningJob, kills: int) -> None:
        """Disturb the job until it ends or `kills` have been done."""
        next_s = time.monotonic() + self.every_s
        while job.running and kills:
            living = executors(job.pid)
            if time.monotonic() < next_s or len(living) < NUM_EXECUTORS:  # the job or an executor is starting
                time.sleep(_LOOK_S)
            elif self._strike(job, living):
                kills -= 1
                next_s = max(next_s + self.every_s, time.monotonic())

    def _strike(self, job: RunningJob, living: Mapping[str, int]) -> bool:
        if self._chance.random() < self.controller_share:
            job.kill_and_resume()
            self._tell(job, CONTROLLER, "any state", "SIGKILL")
            return True
        name = self._chance.choice(sorted(living))
        state = self._chance.choice(STATES if name.startswith("trainer") else STATES[:3])
        number = signal.SIGSTOP if self._chance.random() < self.stop_share else signal.SIGKILL
        deadline_s = time.monotonic() + _STATE_S
        while not (met := job.is_in(state, living[name])) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        try:
            os.kill(living[name], number)
        except ProcessLookupError:
            return False
        self._tell(job, name, state if met else "any state", number.name)
        return True

    def _tell(self, job: RunningJob, name: str, state: str, number: str) -> None:
        self.done.append(f"{name} {state}")
        print(f"{len(self.done):>4}  {number}  {name} ({state})  in {job.folder.name}", flush=True)
