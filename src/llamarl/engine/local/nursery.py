"""The nursery: a process that has imported torch, has no threads and no CUDA, and forks executor ranks on request.

A fork takes milliseconds where a fresh interpreter takes seconds to import torch, so restarts are cheap. Run as a program:
`python -m llamarl.engine.local.nursery FD`, with FD a SEQPACKET socket to the engine.
"""

from __future__ import annotations

import array
import ctypes
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from llamarl.engine.local.wire import Birth, Born, Kill, Obituary, decode_order, encode

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 1 << 20
_MAX_FDS = 64
_REAP_EVERY_S = 0.1


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent is gone, however that happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was gone before we asked


def describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.WEXITSTATUS(status)}"


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    message, ancillary, _, _ = control.recvmsg(_MAX_MESSAGE, socket.CMSG_LEN(_MAX_FDS * fds.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)


class Nursery:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, Birth] = {}

    def run(self) -> None:
        """Until the engine closes the control socket; then every child is killed."""
        self._control.send(b"ready")
        while True:
            readable, _, _ = select.select([self._control], [], [], _REAP_EVERY_S)
            self._reap()
            if not readable:
                continue
            data, fds = receive(self._control)
            if not data:
                break
            order = decode_order(data)
            if isinstance(order, Birth):
                self._bear(order, fds)
            else:
                self._kill(order)
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _bear(self, birth: Birth, fds: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            _live(birth, fds, parent)
        self._children[pid] = birth
        for fd in fds:
            os.close(fd)  # a copy kept here would hide the child's death
        self._say(Born(birth.executor, birth.incarnation, birth.rank, pid))

    def _kill(self, order: Kill) -> None:
        for pid, birth in self._children.items():
            if (birth.executor, birth.incarnation, birth.rank) == (order.executor, order.incarnation, order.rank):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            birth = self._children.pop(pid)
            self._say(Obituary(birth.executor, birth.incarnation, birth.rank, describe_status(status)))

    def _say(self, news: Born | Obituary) -> None:
        with suppress(BrokenPipeError):
            self._control.send(encode(news))


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


def main() -> None:
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine alone decides
    import torch  # noqa: F401

    Nursery(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
