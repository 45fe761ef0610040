"""The hosts of a job: reached or not, how much room they have, and how long they have been silent.

Reaching a host takes time and may never succeed, so it is tried in a thread; what comes of it is the first pulse of its
keeper. A heart of its own beats for all hosts, so that none takes a busy driver for a dead one.
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
_ATTACH_S = 6.0
_TRY_S = 15.0  # from the first word to the first pulse
_LONGEST_FOLDER = 30  # bytes of the path of a folder that Monarch can have its sockets in


class Reach(Protocol):
    """How a host's worker is found."""

    url: str

    def prepare(self) -> None:
        """By the engine's own thread, since a process that is to die with its parent dies with that thread of it."""

    def ready(self) -> bool:
        """Whether somebody listens there; may wait a little."""

    def close(self) -> None:
        """End what was started for it."""


class Elsewhere:
    """A worker that somebody else has started."""

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
    """A folder of our own, with a path that leaves room for Monarch's names. It goes when this process does, also when that
    is killed: a shell waits for the end of a pipe that nobody else holds."""

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
        """Started, also anew if it has died."""
        if self._process is not None and self._process.poll() is not None:
            if not self._was_ready:
                raise JobFailed(f"the worker could not start (exit code {self._process.returncode}); see {self._log}")
            self._ready.close()
            self._process = None
        if self._process is None:
            self._start()

    def ready(self) -> bool:
        """Left for others to see: an earlier try may still be waiting for it."""
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
                env={**os.environ, SLOTS: named, "TMPDIR": self._folder.path},  # so that Monarch's sockets go with it
                process_group=0,
            )
        theirs.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # and the kernel all that it has started
            self._process.wait()
            self._ready.close()
        self._folder.close()


class Host:
    def __init__(self, number: int, name: str, reach: Reach, settings: HostConfig, log: Path) -> None:
        self.number, self.name, self._reach, self._settings, self._log = number, name, reach, settings, log
        self.up = False
        self.seen = False  # at least once
        self.life = 0  # how often it was reached
        self.heard_s = 0.0
        self.ahead_s = 0.0  # by which its clock is ahead of ours
        self._clock_is_ours = isinstance(reach, OwnWorker)
        self.mesh: Any = None
        self._keeper: Any = None
        self._next_try_s = 0.0
        self.taken: dict[tuple[str, int], int | None] = {}  # (executor, rank) that lives there -> its GPU, if any

    # Room

    def room(self, role: str) -> HostRoom:
        allowed = self.up and (not self._settings.roles or role in self._settings.roles)
        limit = self._settings.ranks or ANY_NUMBER
        return HostRoom(self.number, len(self.taken), max(0, limit - len(self.taken)) if allowed else 0)

    def take(self, executor: str, rank: int, *, gpu: bool) -> int | None:
        """Returns the number of the GPU that the rank gets, if its role uses one: the lowest that is free."""
        self._note(f"takes {executor} rank {rank}")
        free = (number for number in range(ANY_NUMBER) if number not in self.taken.values())
        self.taken[executor, rank] = number = next(free) if gpu else None
        return number

    # Life

    def try_to_reach(self, port: Any, job: str, silence_s: float) -> None:
        """Each try is a life of its own: one that hangs is not waited for."""
        if not self.up and time.monotonic() >= self._next_try_s:
            self.life, self.ahead_s, self._next_try_s = self.life + 1, 0.0, time.monotonic() + _TRY_S
            self._reach.prepare()
            threading.Thread(target=self._try, args=(self.life, port, job, silence_s), daemon=True).start()

    def _try(self, life: int, port: Any, job: str, silence_s: float) -> None:
        try:
            if self._reach.ready():
                mesh = attach_to_workers(
                    ca="trust_all_connections",  # that is: all that the transport lets through
                    workers=[self._reach.url],
                    name=f"host{self.number}_{life}_{secrets.token_hex(4)}",
                )
                mesh.initialized.get(timeout=_ATTACH_S)
                procs = mesh.spawn_procs(per_host={"keepers": 1}, name="keeper", bootstrap_command=bare_command())
                keeper = procs.spawn("keeper", HostAgent, port, job, self.name, life, silence_s)
                if life == self.life:
                    self._note("reached")
                    self.mesh, self._keeper = mesh, keeper
                    return  # its first pulse will tell
        except Exception as error:  # the border to Monarch: whatever it says, the host is not there yet
            self._note(f"not reached: {type(error).__name__}: {error}")
        if life == self.life:
            self._next_try_s = time.monotonic() + _TRY_AGAIN_S

    def hear(self, clock_s: float) -> None:
        if not self.up:
            self._note("there")
        self.up = self.seen = True
        self.heard_s = time.monotonic()
        if not self._clock_is_ours:  # the pulse that took least time to come tells most
            self.ahead_s = max(self.ahead_s, clock_s - self.heard_s) if self.ahead_s else clock_s - self.heard_s

    def beat(self) -> None:
        if self._keeper is not None:
            with suppress(Exception):  # the border to Monarch: a host that cannot be told anything is silent
                self._keeper.beat.broadcast()

    def kill(self, name: str) -> None:
        if self._keeper is not None:
            with suppress(Exception):
                self._keeper.kill.broadcast(name)

    def lose(self) -> None:
        self._note("lost")
        self.up, self._keeper, self.mesh, self._next_try_s = False, None, None, 0.0
        self.taken.clear()

    def _note(self, text: str) -> None:
        with suppress(OSError), self._log.open("a") as log:
            log.write(f"{datetime.now(UTC):%H:%M:%S.%f} {self.name}, try {self.life}: {text}\n")

    def close(self) -> None:
        if self._keeper is not None:
            with suppress(Exception):
                self._keeper.end.broadcast()
        self._reach.close()
