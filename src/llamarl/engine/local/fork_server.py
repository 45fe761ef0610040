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
    Forks,
    control_from_arguments,
    import_what_children_need,
    start_forking,
)
from llamarl.engine.local.protocol import ForkRank, KillFork, RankExited, RankForked, decode_order
from llamarl.processes import describe_status


class ForkServer(Forks):
    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._births: dict[int, ForkRank] = {}  # by pid

    def obey(self, data: bytes, fds: list[int]) -> None:
        with suppress(msgspec.MsgspecError):
            order = decode_order(data)
            if isinstance(order, ForkRank):
                self._bear(order, fds)
            else:
                self._kill(order)

    def buried(self, pid: int, status: int) -> None:
        birth = self._births.pop(pid)
        self.say(encode(RankExited(*birth.identity, describe_status(status))))

    def _bear(self, birth: ForkRank, fds: list[int]) -> None:
        try:
            pid = self.fork(lambda: _live(birth, fds))
        except OSError as error:
            self.say(encode(RankExited(*birth.identity, f"could not be forked: {error.strerror}")))
            return
        self._births[pid] = birth
        self.say(encode(RankForked(*birth.identity, pid)))

    def _kill(self, order: KillFork) -> None:
        for pid, birth in self._births.items():
            if birth.identity == order.identity:
                os.kill(pid, signal.SIGKILL)


def _live(birth: ForkRank, fds: list[int]) -> None:
    from llamarl.engine.local.child import live

    live(birth, fds)


_ahead: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


def start_fork_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The engine's side: the new process, and the control socket to it."""
    return _ahead.pop() if _ahead else start_forking("llamarl.engine.local.fork_server")


@contextmanager
def nursery_ahead() -> Iterator[None]:
    """One for the next `start_nursery`, if that comes within. To be entered before this process imports torch, so that both
    import it at the same time."""
    _ahead.append(start_forking("llamarl.engine.local.fork_server"))
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
    import_what_children_need()

    import llamarl.engine.local.child  # noqa: F401

    ForkServer(control).run()
    os._exit(0)  # there is nothing to tidy up, and taking an interpreter with torch in it apart takes long


if __name__ == "__main__":
    main()
