"""What the fork servers of both engines share. A fork server has imported torch, and has no threads and no CUDA: forking it
takes milliseconds, where a fresh interpreter takes seconds."""

from __future__ import annotations

import array
import gc
import os
import select
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from llamarl.engine.compiled_code import compiled_environment
from llamarl.processes import PYTHON, die_with_parent, imports_undisturbed

READY = b"ready"
MAX_MESSAGE = 1 << 20
_MAX_FDS = 64


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    # Close-on-exec: a program that an executor starts must not keep the executor's connection open after its death.
    message, ancillary, _, _ = control.recvmsg(
        MAX_MESSAGE, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)


class ForkServerLoop(ABC):
    """Carries out orders that come over a control socket, and learns of the end of its children at once and in order."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        # A socket that SIGCHLD writes to, so that the end of a child interrupts the wait for orders.
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_sender.setblocking(False)
        self._poll = select.poll()
        self._watched: dict[int, Callable[[], None]] = {}

    @abstractmethod
    def on_order(self, data: bytes, fds: list[int]) -> None:
        """Carry out an order. Anything else must be ignored: all executors depend on this process."""

    @abstractmethod
    def on_exit(self, pid: int, status: int) -> None:
        """A child has ended, with this wait status."""

    def watch(self, connection: socket.socket, on_ready: Callable[[], None]) -> None:
        """Call `on_ready` when there is something to read from the connection, or its other end is closed."""
        self._watched[connection.fileno()] = on_ready
        self._poll.register(connection, select.POLLIN)

    def unwatch(self, connection: socket.socket) -> None:
        del self._watched[connection.fileno()]
        self._poll.unregister(connection)

    def run(self) -> None:
        """Serve until the control socket closes; then kill every child."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_sender.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)
        self.send(READY)
        while True:
            ready = dict(self._poll.poll())
            if ready.pop(self._wakeup.fileno(), 0):
                self._wakeup.recv(4096)
            self._reap()
            flags = ready.pop(self._control.fileno(), 0)
            if flags & (select.POLLHUP | select.POLLERR):
                break
            if flags & select.POLLIN:
                self._receive_order()
            for fd in ready:
                if fd in self._watched:
                    self._watched[fd]()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def fork(self, body: Callable[[], None]) -> int:
        """Fork a child that runs `body` and never returns into this loop."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave_fork_server()
            _run_child(body, parent)
        self._children.add(pid)
        return pid

    def send(self, message: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(message)

    def _receive_order(self) -> None:
        data, fds = receive(self._control)
        self.on_order(data, fds)
        for fd in fds:
            os.close(fd)  # a copy that stayed open here would hide the child's death

    def _leave_fork_server(self) -> None:
        """In the child: close everything that belongs to the fork server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (self._control, self._wakeup, self._wakeup_sender):
            connection.close()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._children:
                self._children.remove(pid)
                self.on_exit(pid, status)


def _run_child(body: Callable[[], None], parent: int) -> None:
    code = 1
    try:
        die_with_parent(parent)
        os.setpgid(0, 0)
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stderr.flush()
        os._exit(code)


def forking_environment() -> dict[str, str]:
    """Variables that must be set before torch loads. Threads that spin while they wait would take cores from other
    executors, and numpy's BLAS would start threads in a process that must have none."""
    return {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1", **compiled_environment(), **os.environ}


def start_fork_process(
    module: str, *, inherited: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process that runs the module; returns the control socket to it, and the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [*PYTHON, "-m", module, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno(), *inherited],
        stdin=subprocess.DEVNULL,
        env={**forking_environment(), **(environment or {})},
        process_group=0,  # not the terminal's group, to which Ctrl-C is sent: the engine stops this process
    )
    theirs.close()
    return ours, process


def control_from_arguments() -> socket.socket:
    """In the new process: the control socket. From here on the process dies with its parent, and ignores Ctrl-C."""
    fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return socket.socket(fileno=fd)


def import_for_children() -> None:
    """Import torch and everything of ours that executors need. Where there may be a GPU to compile for, also as much of the
    compiler as can be imported while the main process still checks the job; the rest is imported while weights are loaded
    (`train/compiler.py`)."""
    with imports_undisturbed():
        import torch

        import llamarl.builders.registry
        import llamarl.engine.rank_loop  # noqa: F401

        if torch.version.cuda:
            import torch._dynamo
    gc.freeze()  # looking through it later would copy pages that executors share
