"""The nursery: a process that has imported torch, has no threads and no CUDA, and forks executor ranks on request.

A fork takes milliseconds where a fresh interpreter takes seconds to import torch, so restarts are cheap. Run as a program:
`python -m llamarl.engine.local.nursery FD PARENT`, with FD a SEQPACKET socket to the engine and PARENT its process.
"""

from __future__ import annotations

import array
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from llamarl.engine.local.wire import Birth, Born, Kill, Obituary, decode_order, encode

READY = b"ready"
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 1 << 20
_MAX_FDS = 64


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent is gone, however that happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was gone before we asked


def describe_status(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}"


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    # Close-on-exec: a program that an executor runs must not keep the executor's connection open after its death.
    message, ancillary, _, _ = control.recvmsg(
        _MAX_MESSAGE, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)


class Nursery:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, Birth] = {}  # by pid
        # The end of a child interrupts the wait for orders, so that deaths are told at once and in their order.
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)

    def run(self) -> None:
        """Until the engine closes the control socket; then every child is killed."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._bell_rope.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        self._say(READY)
        while True:
            ready = dict(poll.poll())
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
            self._reap()
            flags = ready.get(self._control.fileno(), 0)
            if flags & (select.POLLHUP | select.POLLERR):
                break
            if flags & select.POLLIN:
                self._obey(*receive(self._control))
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)

    def _obey(self, data: bytes, fds: list[int]) -> None:
        """What is no order is ignored: everything that lives hangs on this process."""
        with suppress(msgspec.MsgspecError):
            order = decode_order(data)
            if isinstance(order, Birth):
                self._bear(order, fds)
            else:
                self._kill(order)
        for fd in fds:
            os.close(fd)  # a copy kept here would hide the child's death

    def _bear(self, birth: Birth, fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._say(encode(Obituary(*birth.identity, f"could not be forked: {error.strerror}")))
            return
        if pid == 0:
            self._leave_nursery()
            _live(birth, fds, parent)
        self._children[pid] = birth
        self._say(encode(Born(*birth.identity, pid)))

    def _leave_nursery(self) -> None:
        """In the child: nothing of the nursery's own stays open."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in (self._control, self._bell, self._bell_rope):
            connection.close()

    def _kill(self, order: Kill) -> None:
        for pid, birth in self._children.items():
            if birth.identity == order.identity:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if birth := self._children.pop(pid, None):
                self._say(encode(Obituary(*birth.identity, describe_status(status))))

    def _say(self, news: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(news)


def _live(birth: Birth, fds: list[int], parent: int) -> None:
    """The child's whole life. It never returns into the nursery's loop."""
    code = 1
    try:
        die_with_parent(parent)
        os.setpgid(0, 0)
        from llamarl.engine.local.child import live

        live(birth, fds)
        code = 0
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


def start_nursery() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The engine's side: the new process, and the control socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # All must be set before torch loads. Threads that spin while they wait would take the cores from the other
    # executors; and numpy's BLAS would start threads in a process that is there to be forked.
    environment = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1", **_compile_cache(), **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "llamarl.engine.local.nursery", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
        process_group=0,  # Ctrl-C in a terminal is sent to a whole group; this one is stopped by the engine
    )
    theirs.close()
    return ours, process


def main() -> None:
    fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which alone decides
    # What every child would import, torch above all; and what the first optimizer of a process makes torch import.
    import torch._dynamo  # noqa: F401

    import llamarl.engine.local.child  # noqa: F401

    Nursery(socket.socket(fileno=fd)).run()
    os._exit(0)  # there is nothing to tidy up, and taking an interpreter with torch in it apart takes long


if __name__ == "__main__":
    main()
