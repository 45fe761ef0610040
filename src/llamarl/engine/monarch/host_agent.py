"""The keeper that every host has: answers the engine's beats, and kills what the engine, or its silence, says. No torch."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from typing import Any

from monarch.actor import Actor, endpoint

from llamarl import __version__
from llamarl.engine.monarch.fork_server import NURSERY, KillRank, Watch, decode_obituary, encode_order

_MAX_OBITUARY = 1 << 16
_LAST_WORD_S = 1.0
_FIRST_BEAT_S = 15.0  # so much longer the first beat may take


class HostAgent(Actor):
    """It acts before the engine does: when that takes the host for lost, nothing of the job is alive there any more."""

    def __init__(self, port: Any, job: str, host: str, life: int, silence_s: float) -> None:
        self._port, self._job, self._name, self._silence_s = port, job, (host, life), silence_s
        self._nursery = socket.socket(fileno=os.dup(int(os.environ[NURSERY])))
        self._heard_s = _clock_s() + _FIRST_BEAT_S
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._tell_of_deaths, daemon=True).start()

    @endpoint
    def beat(self) -> None:
        self._heard_s = _clock_s()
        self._port.send((*self._name, __version__, time.monotonic()))

    @endpoint
    def kill(self, name: str) -> None:
        self._nursery.send(encode_order(KillRank(name)))

    def _tell_of_deaths(self) -> None:
        """At once, and in their order; Monarch would notice them too, but by looking now and then."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))
        try:
            self._nursery.sendmsg([encode_order(Watch(self._job))], [rights])
        except OSError:
            os._exit(1)  # that nursery is gone; the engine will come again
        theirs.close()
        while data := ours.recv(_MAX_OBITUARY):
            obituary = decode_obituary(data)
            self._port.send((obituary.name, obituary.reason))
        # Its children died with it. The next nursery is not reached from here: the engine must come anew.
        self._port.send((self._name[0], "the process that starts executors died"))
        time.sleep(_LAST_WORD_S)
        os._exit(1)

    def _watch(self) -> None:
        while _clock_s() - self._heard_s < self._silence_s:
            time.sleep(min(0.1, self._silence_s / 10))
        self._end()

    @endpoint
    def end(self) -> None:
        """Of the job, here."""
        self._end()

    def _end(self) -> None:
        self._nursery.send(encode_order(KillRank(self._job)))
        os._exit(0)


def _clock_s() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
