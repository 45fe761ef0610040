"""Programs of the other virtual environment: the tasks of an environment, and its server."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError
from llamarl.tasks.datasets import Examples
from llamarl.tasks.examples import Example
from llamarl.tasks.task import is_held_out
from llamarl.tasks.verifiers.host import MARK

TASK = "task_data"  # the column of a problem that holds the task as the server wants it
_HOST = Path(__file__).with_name("host.py")
_START_S = 300.0  # importing verifiers and loading a dataset take long
_MAX_SAID = 300


def read_tasks(settings: DatasetConfig) -> Examples:
    """The tasks of an environment as problems, on their sides by the hash of their text. Raises ConfigError."""
    try:
        done = subprocess.run(
            _command(settings, "tasks", str(settings.size)), capture_output=True, env=_variables(settings), check=False
        )
    except OSError as error:
        raise ConfigError(f"task.env_python: {settings.env_python} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise ConfigError(f"task.env: {settings.env} cannot be loaded: {_last_line(done.stderr)}")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for row in _told(done.stdout):
        example = _example(row)
        sides[is_held_out(example.question, settings.held_out)].append(example)
    if not sides[0]:
        raise ConfigError(f"task.env: {settings.env} has no tasks to train on")
    return Examples(*sides, ())


def _example(row: dict[str, Any]) -> Example:
    prompt = row.get("prompt")
    question = prompt if isinstance(prompt, str) else json.dumps(row if prompt is None else prompt)
    answer = row.get("answer")
    told = "" if answer is None else str(answer)
    return Example(question, told, told, columns={TASK: row})


def _told(output: bytes) -> Iterator[dict[str, Any]]:
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            yield msgspec.json.decode(line.removeprefix(MARK), type=dict[str, Any])


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:_MAX_SAID] if lines else "it says nothing"


def _command(settings: DatasetConfig, action: str, argument: str) -> list[str]:
    python = str(Path(settings.env_python).expanduser())
    return [python, str(_HOST), action, json.dumps(environment_config(settings)), argument]


def environment_config(settings: DatasetConfig) -> dict[str, Any]:
    """The settings of the environment, in processes of this machine unless they say otherwise."""
    given = dict(settings.env_config)
    taskset = {**given.pop("taskset", {}), "id": settings.env}
    agent = {"runtime": {"type": "subprocess"}, **given.pop("agent", {})}
    return {"taskset": taskset, "agent": agent, **given}


def _variables(settings: DatasetConfig) -> dict[str, str]:
    """Its own programs are found first, as if the virtual environment were active."""
    programs = str(Path(settings.env_python).expanduser().parent)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}


class EnvironmentServer:
    """The environment server of a job: a process that ends with this one, and can be started again at the same address."""

    def __init__(self, settings: DatasetConfig) -> None:
        self._settings = settings
        self.address = "tcp://127.0.0.1:0"
        self._start()

    def restart_if_dead(self) -> bool:
        """Start it again if it has ended. Returns whether it had."""
        if self._process.poll() is None:
            return False
        self._start()
        return True

    def close(self) -> None:
        self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            _command(self._settings, "serve", self.address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_variables(self._settings),
            process_group=0,
        )
        self._end = weakref.finalize(self, _kill, self._process)
        said: queue.Queue[str] = queue.Queue()
        errors: list[bytes] = []
        for stream, read in ((self._process.stdout, _read_addresses(said)), (self._process.stderr, _keep_last(errors))):
            threading.Thread(target=read, args=(stream,), daemon=True).start()
        try:
            self.address = said.get(timeout=_START_S)
        except queue.Empty:
            self.address = ""
        if not self.address:
            self._end()
            raise ConfigError(
                f"task.env: the server of {self._settings.env} does not start: {_last_line(b''.join(errors))}"
            )

    @property
    def pid(self) -> int:
        return self._process.pid


def _read_addresses(said: queue.Queue[str]) -> Any:
    def read(stream: Any) -> None:
        for line in stream:
            if (text := line.decode(errors="replace")).startswith(MARK):
                said.put(text.removeprefix(MARK).strip())
        said.put("")

    return read


def _keep_last(errors: list[bytes]) -> Any:
    """Read a stream to its end, so that the process never waits, and keep its last lines."""

    def read(stream: Any) -> None:
        for line in stream:
            errors.append(line)
            del errors[:-20]

    return read


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It is asked to end with whatever it has started, and killed if it is late."""
    with suppress(ProcessLookupError, PermissionError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
