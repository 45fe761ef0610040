"""The hosts of a job: whether each is reached, how much room it has, and how long it has been silent.

Reaching a host takes time and may never succeed, so a thread tries it; success shows as the first pulse of the host's agent.
Heartbeats to all hosts come from a thread of their own, so that no host takes a busy driver for a dead one.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from monarch.actor import attach_to_workers

from llamarl.config import HostConfig
from llamarl.engine.forking import READY
from llamarl.engine.monarch.bootstrap import bare_command
from llamarl.engine.monarch.fork_server import SLOTS
from llamarl.engine.monarch.host_agent import HostAgent
from llamarl.engine.monarch.placement import HostRoom
from llamarl.errors import JobFailed
from llamarl.processes import PYTHON
from llamarl.weights.slot_file import SlotFile

ANY_NUMBER = 1 << 30
_TRY_AGAIN_S = 1.0
_CONNECT_S = 2.0
_ATTACH_S = 6.0  # doubled for each attempt in a row that takes longer: on a busy machine, none might succeed
_LONGEST_ATTACH_S = 24.0
_PULSE_S = 9.0  # from there to the first pulse
_LONGEST_FOLDER = 30  # bytes of a path that leaves room for the names of Monarch's sockets


class WorkerLink(Protocol):
    """How the worker of a host is found, or started."""

    url: str

    def prepare(self) -> None:
        """Start the worker if need be. Called by the engine's main thread: a process that dies with its parent dies with the
        thread that started it."""

    def ready(self) -> bool:
        """Whether the worker listens; may wait a little."""

    def close(self) -> None:
        """End what was started."""


class RemoteWorker:
    """A worker on a named host, started by somebody else."""

    def __init__(self, url: str) -> None:
        self.url = url
        host, _, port = url.partition("://")[2].rpartition(":")
        self._address = (host.strip("[]"), int(port))

    def prepare(self) -> None:
        pass

    def ready(self) -> bool:
        with suppress(OSError), socket.create_connection(self._address, timeout=_CONNECT_S):
            return True
        return False

    def close(self) -> None:
        pass


class SocketFolder:
    """A folder with a path that leaves room for the names of Monarch's sockets. It is removed when this process ends, even if
    killed: a shell waits for the end of a pipe that only this process holds."""

    def __init__(self) -> None:
        usual = tempfile.gettempdir()
        short = len(os.fsencode(usual)) <= _LONGEST_FOLDER
        self.path = tempfile.mkdtemp(prefix="llamarl-", dir=usual if short else "/tmp")
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", 'cat; rm -rf -- "$0"', self.path], stdin=subprocess.PIPE, process_group=0
        )

    def close(self) -> None:
        self._remover.communicate()


class OwnWorker:
    """A worker of the engine's own, on this machine, behind a Unix socket in a folder that only the user can enter."""

    def __init__(self, slots: Mapping[str, SlotFile], log: Path) -> None:
        self._slots, self._log = slots, log
        self._folder = SocketFolder()
        self._number = 0
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: socket.socket
        self._was_ready = False

    def prepare(self) -> None:
        """Start the worker, again if it has died."""
        if self._process is not None and self._process.poll() is not None:
            if not self._was_ready:
                raise JobFailed(f"the worker could not start (exit code {self._process.returncode}); see {self._log}")
            self._ready.close()
            self._process = None
        if self._process is None:
            self._start()

    def ready(self) -> bool:
        """Peeks only: an earlier attempt may still be waiting for the same bytes."""
        self._was_ready = self._ready.recv(len(READY), socket.MSG_PEEK) == READY
        return self._was_ready

    def _start(self) -> None:
        self._number, self._was_ready = self._number + 1, False
        self.url = f"ipc://{self._folder.path}/{self._number}"
        self._ready, theirs = socket.socketpair()
        fds = [fd for file in self._slots.values() for fd in file.fds]
        named = ";".join(f"{role}:{','.join(map(str, file.fds))}" for role, file in self._slots.items())
        arguments = map(str, (self.url, os.getpid(), theirs.fileno(), *fds))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", "llamarl.engine.monarch.worker", *arguments],
                pass_fds=[theirs.fileno(), *fds],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, SLOTS: named, "TMPDIR": self._folder.path},  # where Monarch puts its sockets
                process_group=0,
            )
        theirs.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # the kernel then kills all that it has started
            self._process.wait()
            self._ready.close()
        self._folder.close()


class Host:
    """One host of the job, as the engine sees it."""

    def __init__(self, number: int, name: str, link: WorkerLink, settings: HostConfig, log: Path) -> None:
        self.number, self.name, self._link, self._settings, self._log = number, name, link, settings, log
        self.up = False
        self.seen = False  # whether it was ever up
        self.attempt = 0  # number of the current attempt to reach it
        self.heard_s = 0.0  # when its last pulse came
        self.ahead_s = 0.0  # by how much its clock is ahead of ours
        self._clock_is_ours = isinstance(link, OwnWorker)
        self.mesh: Any = None
        self._agent: Any = None
        self._next_try_s, self._attach_s = 0.0, _ATTACH_S
        self.taken: dict[tuple[str, int], int | None] = {}  # (executor, rank) -> its GPU; None: it has none

    # Room

    def room(self, role: str) -> HostRoom:
        allowed = self.up and (not self._settings.roles or role in self._settings.roles)
        limit = self._settings.ranks or ANY_NUMBER
        return HostRoom(self.number, len(self.taken), max(0, limit - len(self.taken)) if allowed else 0)

    def take(self, executor: str, rank: int, *, gpu: bool) -> int | None:
        """Take a rank in; returns the number of its GPU, the lowest that no other rank has, if its role uses GPUs."""
        self._note(f"takes {executor} rank {rank}")
        free = (number for number in range(ANY_NUMBER) if number not in self.taken.values())
        self.taken[executor, rank] = number = next(free) if gpu else None
        return number

    # Reaching it

    def try_to_reach(self, port: Any, job: str, silence_s: float) -> None:
        """Begin an attempt if it is time. One that hangs is not waited for."""
        if not self.up and time.monotonic() >= self._next_try_s:
            self.attempt, self.ahead_s = self.attempt + 1, 0.0
            self._next_try_s = time.monotonic() + _CONNECT_S + self._attach_s + _PULSE_S
            self._link.prepare()
            threading.Thread(target=self._attach, args=(self.attempt, port, job, silence_s), daemon=True).start()

    def _attach(self, attempt: int, port: Any, job: str, silence_s: float) -> None:
        try:
            if self._link.ready():
                mesh = attach_to_workers(
                    ca="trust_all_connections",  # all that the transport lets through
                    workers=[self._link.url],
                    name=f"host{self.number}_{attempt}_{secrets.token_hex(4)}",
                )
                mesh.initialized.get(timeout=self._attach_s)
                procs = mesh.spawn_procs(per_host={"agents": 1}, name="agent", bootstrap_command=bare_command())
                agent = procs.spawn("agent", HostAgent, port, job, self.name, attempt, silence_s)
                if attempt == self.attempt:
                    self._note("reached")
                    self.mesh, self._agent = mesh, agent
                    return  # its first pulse will show that it is up
        except TimeoutError:
            self._note(f"not reached within {self._attach_s:g} s")
            self._attach_s = min(2 * self._attach_s, _LONGEST_ATTACH_S)
        except Exception as error:  # the border to Monarch: whatever it raises, the host is not up yet
            self._note(f"not reached: {type(error).__name__}: {error}")
        if attempt == self.attempt:
            self._next_try_s = time.monotonic() + _TRY_AGAIN_S

    def expects(self, attempt: int) -> bool:
        """Whether pulses of this attempt count. One that was under way when the host was lost would bring nothing back."""
        return attempt == self.attempt and self.mesh is not None

    def on_pulse(self, clock_s: float) -> None:
        if not self.up:
            self._note("there")
        self.up, self.seen, self._attach_s = True, True, _ATTACH_S
        self.heard_s = time.monotonic()
        if not self._clock_is_ours:  # the pulse that traveled fastest is the most exact
            self.ahead_s = max(self.ahead_s, clock_s - self.heard_s) if self.ahead_s else clock_s - self.heard_s

    def beat(self) -> None:
        if self._agent is not None:
            with suppress(Exception):  # the border to Monarch: a host that cannot be reached will fall silent
                self._agent.beat.broadcast()

    def kill(self, name: str) -> None:
        if self._agent is not None:
            with suppress(Exception):
                self._agent.kill.broadcast(name)

    def lose(self) -> None:
        self._note("lost")
        self.up, self._agent, self.mesh, self._next_try_s = False, None, None, 0.0
        self.taken.clear()

    def _note(self, text: str) -> None:
        with suppress(OSError), self._log.open("a") as log:
            log.write(f"{datetime.now(UTC):%H:%M:%S.%f} {self.name}, try {self.attempt}: {text}\n")

    def close(self) -> None:
        if self._agent is not None:
            with suppress(Exception):
                self._agent.end.broadcast()
        self._link.close()
