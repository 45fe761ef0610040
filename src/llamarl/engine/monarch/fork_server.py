"""The nursery of a host: forks the processes of Monarch's meshes from one that has imported torch, in the name of stubs.

Run as a program: `python -m llamarl.engine.monarch.fork_server FD PARENT`. A stub that is gone takes its process with it.
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

from llamarl.engine.forking import Forks, control_from_arguments, import_what_children_need
from llamarl.processes import describe_status

RANK = "LLAMARL_RANK"  # environment of a process that is a rank: its name, by which it can be killed
NURSERY, SLOTS = "LLAMARL_NURSERY", "LLAMARL_SLOTS"  # what a worker tells its processes: descriptors


class Launch(Struct, frozen=True, tag=True):
    """Comes with descriptors: the three standard ones, and the stub's end of a socket pair."""

    environment: dict[str, str]


class KillRank(Struct, frozen=True, tag=True):
    name: str  # or what its name, and those of others, begin with


class Watch(Struct, frozen=True, tag=True):
    """Comes with a socket, on which the end of each rank with such a name is told from now on."""

    name: str


class ForkExited(Struct, frozen=True):
    name: str
    reason: str


decode_order = msgspec.json.Decoder(Launch | KillRank | Watch).decode
encode_order = msgspec.json.Encoder().encode
decode_obituary = msgspec.json.Decoder(ForkExited).decode


@dataclass(frozen=True)
class ForkedProcess:
    name: str
    stub: socket.socket


class HostForkServer(Forks):
    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._charges: dict[int, ForkedProcess] = {}  # by pid
        self._watching: list[tuple[str, socket.socket]] = []

    def obey(self, data: bytes, fds: list[int]) -> None:
        with suppress(msgspec.MsgspecError):
            order = decode_order(data)
            match order:
                case Launch():
                    self._bear(order, fds)
                case KillRank():
                    self._kill(order.name)
                case Watch():
                    self._watching.append((order.name, socket.socket(fileno=os.dup(fds[0]))))

    def buried(self, pid: int, status: int) -> None:
        charge = self._charges.pop(pid)
        self._tell(ForkExited(charge.name, describe_status(status)))
        with suppress(OSError):
            charge.stub.send(status.to_bytes(4, "little"))
        self.unwatch(charge.stub)
        charge.stub.close()

    def _tell(self, obituary: ForkExited) -> None:
        for watched, watcher in list(self._watching):
            if not obituary.name.startswith(watched):
                continue
            try:
                watcher.send(encode_order(obituary), socket.MSG_DONTWAIT)
            except OSError:  # its job is over
                self._watching.remove((watched, watcher))
                watcher.close()

    def _bear(self, order: Launch, fds: Sequence[int]) -> None:
        stub = socket.socket(fileno=os.dup(fds[3]))
        try:
            pid = self.fork(lambda: self._live(order, fds))
        except OSError:
            stub.close()  # which ends the stub, and Monarch hears of it
            return
        self._charges[pid] = ForkedProcess(order.environment.get(RANK, ""), stub)
        self.watch(stub, lambda: _kill(pid))

    def _live(self, order: Launch, fds: Sequence[int]) -> None:
        for connection in [one.stub for one in self._charges.values()] + [one for _, one in self._watching]:
            connection.close()
        become_monarch_process(order.environment, fds)

    def _kill(self, name: str) -> None:
        for pid, charge in self._charges.items():
            if charge.name.startswith(name):
                _kill(pid)


def _kill(pid: int) -> None:
    """A child of this process, which has not buried it yet: so no stranger can have its number."""
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
    import_what_children_need()
    HostForkServer(control).run()
    os._exit(0)


if __name__ == "__main__":
    main()
