"""The fork server: a process that has imported torch, has no threads and no CUDA, and forks executor ranks on request.

Run as a program: `python -m llamarl.engine.local.fork_server FD PARENT`, with FD a SEQPACKET socket to the engine and
PARENT its process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from llamarl.engine.envelope import encode
from llamarl.engine.forking import (
    ForkServerLoop,
    control_from_arguments,
    import_for_children,
    start_fork_process,
)
from llamarl.engine.local.protocol import ForkRank, KillFork, RankExited, RankForked, decode_order
from llamarl.processes import describe_status


class ForkServer(ForkServerLoop):
    """Forks executor ranks, and tells the engine when each was forked and how it ended."""

    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._ranks: dict[int, ForkRank] = {}  # by pid

    def on_order(self, data: bytes, fds: list[int]) -> None:
        with suppress(msgspec.MsgspecError):
            order = decode_order(data)
            if isinstance(order, ForkRank):
                self._fork(order, fds)
            else:
                self._kill(order)

    def on_exit(self, pid: int, status: int) -> None:
        rank = self._ranks.pop(pid)
        self.send(encode(RankExited(*rank.identity, describe_status(status))))

    def _fork(self, order: ForkRank, fds: list[int]) -> None:
        try:
            pid = self.fork(lambda: _run_child(order, fds))
        except OSError as error:
            self.send(encode(RankExited(*order.identity, f"could not be forked: {error.strerror}")))
            return
        self._ranks[pid] = order
        self.send(encode(RankForked(*order.identity, pid)))

    def _kill(self, order: KillFork) -> None:
        for pid, rank in self._ranks.items():
            if rank.identity == order.identity:
                os.kill(pid, signal.SIGKILL)


def _run_child(order: ForkRank, fds: list[int]) -> None:
    from llamarl.engine.local.child import run_child

    run_child(order, fds)


_ahead: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


def start_fork_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The engine's side: the control socket to a fork server, and its process."""
    return _ahead.pop() if _ahead else start_fork_process("llamarl.engine.local.fork_server")


@contextmanager
def fork_server_ahead() -> Iterator[None]:
    """Start a fork server now, for the next `start_fork_server` within this context. Entered before this process imports
    torch, so that both import it at the same time."""
    _ahead.append(start_fork_process("llamarl.engine.local.fork_server"))
    try:
        yield
    finally:
        while _ahead:
            control, process = _ahead.pop()
            control.close()
            process.kill()
            process.wait()


def main() -> None:
    control = control_from_arguments()
    import_for_children()

    import llamarl.engine.local.child  # noqa: F401

    ForkServer(control).run()
    os._exit(0)  # there is nothing to clean up, and finalizing an interpreter with torch takes long


if __name__ == "__main__":
    main()
