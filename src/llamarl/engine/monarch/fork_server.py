"""The fork server of a host: forks the processes of Monarch's meshes, each for a stub that Monarch started.

Run as a program: `python -m llamarl.engine.monarch.fork_server FD PARENT`. When a stub ends, its process is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from llamarl.engine.forking import ForkServerLoop, control_from_arguments, import_for_children
from llamarl.processes import describe_status

# Environment variables, set by our own processes.
RANK = "LLAMARL_RANK"  # the name of a rank, by which it can be killed
FORK_SERVER, SLOTS = "LLAMARL_FORK_SERVER", "LLAMARL_SLOTS"  # descriptors that a worker passes to its processes


class Launch(Struct, frozen=True, tag=True):
    """Order to fork a process. Descriptors come with it: the three standard ones, and the stub's end of a socket pair."""

    environment: dict[str, str]


class KillRank(Struct, frozen=True, tag=True):
    """Order to kill all ranks whose names begin with this."""

    name: str


class Watch(Struct, frozen=True, tag=True):
    """Order to report, from now on, the end of each rank whose name begins with this. A socket for that comes with it."""

    name: str


class ForkExited(Struct, frozen=True):
    """A rank has ended."""

    name: str
    reason: str


decode_order = msgspec.json.Decoder(Launch | KillRank | Watch).decode
encode_order = msgspec.json.Encoder().encode
decode_exit = msgspec.json.Decoder(ForkExited).decode


@dataclass(frozen=True)
class ForkedProcess:
    """A process, and the connection to the stub that stands for it."""

    name: str
    stub: socket.socket


class HostForkServer(ForkServerLoop):
    """Forks processes for stubs, and tells watchers how each ended."""

    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._forked: dict[int, ForkedProcess] = {}  # by pid
        self._watching: list[tuple[str, socket.socket]] = []

    def on_order(self, data: bytes, fds: list[int]) -> None:
        with suppress(msgspec.MsgspecError):
            order = decode_order(data)
            match order:
                case Launch():
                    self._launch(order, fds)
                case KillRank():
                    self._kill(order.name)
                case Watch():
                    self._watching.append((order.name, socket.socket(fileno=os.dup(fds[0]))))

    def on_exit(self, pid: int, status: int) -> None:
        process = self._forked.pop(pid)
        self._tell(ForkExited(process.name, describe_status(status)))
        with suppress(OSError):
            process.stub.send(status.to_bytes(4, "little"))
        self.unwatch(process.stub)
        process.stub.close()

    def _tell(self, exited: ForkExited) -> None:
        for watched, watcher in list(self._watching):
            if not exited.name.startswith(watched):
                continue
            try:
                watcher.send(encode_order(exited), socket.MSG_DONTWAIT)
            except OSError:  # the watcher's job is over
                self._watching.remove((watched, watcher))
                watcher.close()

    def _launch(self, order: Launch, fds: Sequence[int]) -> None:
        stub = socket.socket(fileno=os.dup(fds[3]))
        try:
            pid = self.fork(lambda: self._run_child(order, fds))
        except OSError:
            stub.close()  # ends the stub, which Monarch notices
            return
        self._forked[pid] = ForkedProcess(order.environment.get(RANK, ""), stub)
        self.watch(stub, lambda: _kill(pid))

    def _run_child(self, order: Launch, fds: Sequence[int]) -> None:
        for connection in [one.stub for one in self._forked.values()] + [one for _, one in self._watching]:
            connection.close()
        become_monarch_process(order.environment, fds)

    def _kill(self, name: str) -> None:
        for pid, process in self._forked.items():
            if process.name.startswith(name):
                _kill(pid)


def _kill(pid: int) -> None:
    """Kill a child that has not been waited for, so that no other process can have its pid."""
    os.kill(pid, signal.SIGKILL)


def become_monarch_process(environment: dict[str, str], fds: Sequence[int]) -> None:
    for standard, fd in enumerate(fds[:3]):
        os.dup2(fd, standard)
    for fd in fds:
        os.close(fd)
    os.environ.update(environment)
    sys.argv = ["llamarl-rank"]
    from monarch._src.actor.bootstrap_main import invoke_main

    invoke_main()


def main() -> None:
    control = control_from_arguments()
    import_for_children()
    HostForkServer(control).run()
    os._exit(0)


if __name__ == "__main__":
    main()
