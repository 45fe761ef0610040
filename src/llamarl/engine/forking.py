"""Forking from a process that has imported torch, has no threads and no CUDA: a fork takes milliseconds where a fresh
interpreter takes seconds. What the nurseries of the engines share."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from llamarl.processes import PYTHON, die_with_parent

READY = b"ready"
MAX_MESSAGE = 1 << 20
_MAX_FDS = 64


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    # Close-on-exec: a program that an executor runs must not keep the executor's connection open after its death.
    message, ancillary, _, _ = control.recvmsg(
        MAX_MESSAGE, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)


class Forks(ABC):
    """Obeys orders that come over a control socket, and hears of the end of its children at once and in their order."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        # The end of a child interrupts the wait for orders.
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._poll = select.poll()
        self._watched: dict[int, Callable[[], None]] = {}

    @abstractmethod
    def obey(self, data: bytes, fds: list[int]) -> None:
        """What is no order is ignored: everything that lives hangs on this process."""

    @abstractmethod
    def buried(self, pid: int, status: int) -> None:
        """A child has ended."""

    def watch(self, connection: socket.socket, heard: Callable[[], None]) -> None:
        """Call this when something can be read from the connection, or its other end is gone."""
        self._watched[connection.fileno()] = heard
        self._poll.register(connection, select.POLLIN)

    def unwatch(self, connection: socket.socket) -> None:
        del self._watched[connection.fileno()]
        self._poll.unregister(connection)

    def run(self) -> None:
        """Until the control socket closes; then every child is killed."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._bell_rope.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)
        self.say(READY)
        while True:
            ready = dict(self._poll.poll())
            if ready.pop(self._bell.fileno(), 0):
                self._bell.recv(4096)
            self._reap()
            flags = ready.pop(self._control.fileno(), 0)
            if flags & (select.POLLHUP | select.POLLERR):
                break
            if flags & select.POLLIN:
                self._take_order()
            for fd in ready:
                if fd in self._watched:
                    self._watched[fd]()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def fork(self, life: Callable[[], None]) -> int:
        """A child that leads this life and never returns into the nursery's loop."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave_nursery()
            _live(life, parent)
        self._children.add(pid)
        return pid

    def say(self, news: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(news)

    def _take_order(self) -> None:
        data, fds = receive(self._control)
        self.obey(data, fds)
        for fd in fds:
            os.close(fd)  # a copy kept here would hide the child's death

    def _leave_nursery(self) -> None:
        """In the child: nothing of the nursery's own stays open."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (self._control, self._bell, self._bell_rope):
            connection.close()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._children:
                self._children.remove(pid)
                self.buried(pid, status)


def _live(life: Callable[[], None], parent: int) -> None:
    code = 1
    try:
        die_with_parent(parent)
        os.setpgid(0, 0)
        life()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _compile_cache() -> dict[str, str]:
    """Where torch keeps compiled code, which it unpickles: a folder of the user's own. Left to itself it makes one with a
    guessable name in the shared temporary folder, as soon as a process has an optimizer."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamarl" / "torch"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (OSError, RuntimeError):  # a user without a home
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder)}


def forking_environment() -> dict[str, str]:
    """All must be set before torch loads. Threads that spin while they wait would take the cores from the other
    executors; and numpy's BLAS would start threads in a process that is there to be forked."""
    return {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1", **_compile_cache(), **os.environ}


def start_forking(
    module: str, *, inherited: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The other side: a new process that runs the module, and the control socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [*PYTHON, "-m", module, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno(), *inherited],
        stdin=subprocess.DEVNULL,
        env={**forking_environment(), **(environment or {})},
        process_group=0,  # Ctrl-C in a terminal is sent to a whole group; this one is stopped by the engine
    )
    theirs.close()
    return ours, process


def control_from_arguments() -> socket.socket:
    """In the new process: the control socket. It dies with its parent, and leaves Ctrl-C to those who decide."""
    fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return socket.socket(fileno=fd)


def import_what_children_need() -> None:
    """torch above all; and, where there may be a GPU to compile for, its compiler."""
    import torch

    import llamarl.builders.registry
    import llamarl.engine.rank_loop  # noqa: F401

    if torch.version.cuda:
        import torch._dynamo
