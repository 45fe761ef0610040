"""The worker's side of joining: offers this host to a job, again whenever the job is lost, until told to leave.

No torch and no Monarch here.
"""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llamarl import __version__
from llamarl.config.engine import is_loopback
from llamarl.engine.monarch.addresses import split_address, url_of
from llamarl.engine.monarch.join_protocol import (
    JoinAccepted,
    JoinConnection,
    JoinConnectionClosed,
    JoinRefused,
    JoinRequest,
    LeaveGranted,
    LeaveRequest,
    StillHere,
    tls_context,
)
from llamarl.errors import InputError, JobFailed

_TRY_AGAIN_S = 1.0
_CONNECT_S = 5.0
_STILL_HERE_S = 2.0
_GONE_MS = 10_000  # after which a job that acknowledges nothing counts as gone
_LEAVE_S = 10.0  # longest wait for the job's leave
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def check_join(listen: str, join: str, certs: str) -> None:
    """Refuse addresses at which worker and job could not reach each other."""
    url_of("--join", join, certs)
    (host, _), (job, _) = split_address("--listen", listen), split_address("--join", join)
    if is_loopback(host) and not is_loopback(job):
        raise InputError(f"--listen: {listen} can be reached from this machine only, and the job is at {join}")


def begin_to_count_gpus() -> Callable[[], int]:
    """Ask another process, since this one has no torch, how many GPUs executors would see here. The function that is returned
    waits for the answer."""
    asked = subprocess.Popen([sys.executable, "-c", _COUNT_GPUS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def count() -> int:
        answer, _ = asked.communicate()
        return int(answer) if answer.strip().isdigit() else 0

    return count


class JoinClient:
    """Keeps this host offered to the job at one address."""

    def __init__(self, join: str, certs: str, *, listen: str, count_gpus: Callable[[], int], replicas: int) -> None:
        self._join, self._certs, self._listen = join, certs, listen
        self._count_gpus, self._replicas = count_gpus, replicas
        self._worker = secrets.token_hex(8)
        self._leaving = threading.Event()
        self._said = ""

    def leave(self) -> None:
        """Ask the job for leave, then end. Safe in a signal handler."""
        self._leaving.set()

    def run(self) -> None:
        """Returns when this host has left; JobFailed if the job does not want it."""
        request = JoinRequest(__version__, self._listen, self._worker, self._count_gpus(), self._replicas)
        while not self._leaving.is_set():
            try:
                with self._connected() as connection:
                    self._take_part(connection, request)
            except (JoinConnectionClosed, OSError) as error:
                self._say(f"no job at {self._join} ({error}); trying again")
                self._leaving.wait(_TRY_AGAIN_S)

    def _take_part(self, connection: JoinConnection, request: JoinRequest) -> None:
        connection.send(request)
        self._say(f"offered to the job at {self._join}")
        next_sign_s = 0.0
        while not self._leaving.is_set():
            if time.monotonic() >= next_sign_s:
                connection.send(StillHere())
                next_sign_s = time.monotonic() + _STILL_HERE_S
            for message in connection.receive():
                if isinstance(message, JoinAccepted):
                    self._say(f"joined the job at {self._join} with {', '.join(message.executors)}")
                elif isinstance(message, JoinRefused):
                    raise JobFailed(f"worker: the job at {self._join} does not want this host: {message.reason}")
        self._say(f"leaving the job at {self._join}")
        connection.send(LeaveRequest())
        deadline_s = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline_s:
            if any(isinstance(message, LeaveGranted) for message in connection.receive()):
                return

    @contextmanager
    def _connected(self) -> Iterator[JoinConnection]:
        host, port = split_address("--join", self._join)
        with socket.create_connection((host, port), timeout=_CONNECT_S) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
            if not self._certs:
                yield JoinConnection(plain)
                return
            with tls_context(self._certs, server=False).wrap_socket(plain, server_hostname=host) as secured:
                yield JoinConnection(secured)

    def _say(self, text: str) -> None:
        """Print what has changed, once."""
        if text != self._said:
            self._said = text
            print(f"llamarl worker: {text}", file=sys.stderr, flush=True)


@contextmanager
def leaving_on_signals(client: JoinClient) -> Iterator[None]:
    """SIGTERM or Ctrl-C announce the leave; a second one ends the worker at once."""

    def leave(number: int, frame: object) -> None:
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)
        client.leave()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    yield
