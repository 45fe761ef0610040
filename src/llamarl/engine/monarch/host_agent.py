"""The agent of a host: answers the engine's heartbeats, and kills ranks when the engine asks, or falls silent. No torch."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from typing import Any

from monarch.actor import Actor, endpoint

from llamarl import __version__
from llamarl.engine.monarch.fork_server import FORK_SERVER, KillRank, Watch, decode_exit, encode_order

_MAX_MESSAGE = 1 << 16
_LAST_WORD_S = 1.0
_FIRST_BEAT_S = 15.0  # added to the limit for the first heartbeat


class HostAgent(Actor):
    """Ends the job on its host when heartbeats stop, before the engine takes the host for lost: then nothing of the job is
    alive there any more."""

    def __init__(self, port: Any, job: str, host: str, attempt: int, silence_s: float) -> None:
        self._port, self._job, self._name, self._silence_s = port, job, (host, attempt), silence_s
        self._fork_server = socket.socket(fileno=os.dup(int(os.environ[FORK_SERVER])))
        self._heard_s = _clock_s() + _FIRST_BEAT_S
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._report_exits, daemon=True).start()

    @endpoint
    def beat(self) -> None:
        self._heard_s = _clock_s()
        self._port.send((*self._name, __version__, time.monotonic()))

    @endpoint
    def kill(self, name: str) -> None:
        self._fork_server.send(encode_order(KillRank(name)))

    def _report_exits(self) -> None:
        """Report ends of ranks at once and in order. Monarch would notice them too, but later, since it polls."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))
        try:
            self._fork_server.sendmsg([encode_order(Watch(self._job))], [rights])
        except OSError:
            os._exit(1)  # that fork server died; the engine will start another agent
        theirs.close()
        while data := ours.recv(_MAX_MESSAGE):
            exited = decode_exit(data)
            self._port.send((exited.name, exited.reason))
        # Its children died with it. This process cannot reach the next fork server: the engine must start another agent.
        self._port.send((self._name[0], "the process that starts executors died"))
        time.sleep(_LAST_WORD_S)
        os._exit(1)

    def _watch(self) -> None:
        while _clock_s() - self._heard_s < self._silence_s:
            time.sleep(min(0.1, self._silence_s / 10))
        self._end()

    @endpoint
    def end(self) -> None:
        """End the job on this host."""
        self._end()

    def _end(self) -> None:
        self._fork_server.send(encode_order(KillRank(self._job)))
        os._exit(0)


def _clock_s() -> float:
    """A clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
