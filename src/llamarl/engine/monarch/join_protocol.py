"""What a worker that joins a running job and that job tell each other: lines of JSON, over mutual TLS beyond loopback.

The connection only says who wants to come or go. Executors, heartbeats and weights take the same ways as on any other host.
No torch and no Monarch here.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from llamarl.engine.monarch.addresses import CA, CERTIFICATE, KEY

POLL_S = 0.2  # how long a look for messages waits
SEND_S = 5.0
_MAX_LINE = 8192


class JoinMessage(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message of a worker, or of the job."""


class JoinRequest(JoinMessage, frozen=True):
    """A worker offers its host."""

    version: str  # of llamarl
    address: str  # where the worker listens, as the job will reach it
    worker: str  # differs for each start of the worker
    gpus: Annotated[int, Meta(ge=0, le=4096)]
    replicas: Annotated[int, Meta(ge=0, le=4096)] = 0  # 0: as many as its GPUs allow


class StillHere(JoinMessage, frozen=True):
    """Sent now and then, so that a worker notices a job that is gone."""


class LeaveRequest(JoinMessage, frozen=True):
    """The worker is about to end."""


class JoinAccepted(JoinMessage, frozen=True):
    executors: tuple[str, ...]  # that the job starts there


class JoinRefused(JoinMessage, frozen=True):
    """The job does not want this host, or not any more. Asking again would not help."""

    reason: str


class LeaveGranted(JoinMessage, frozen=True):
    """Nothing of the job is expected of this host any more."""


AnyJoinMessage = JoinRequest | StillHere | LeaveRequest | JoinAccepted | JoinRefused | LeaveGranted

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyJoinMessage).decode


class JoinConnectionClosed(Exception):
    """The other side has closed the connection, or broken the protocol."""


class JoinConnection:
    """One end of a connection. To be used by one thread: an SSL socket does not stand two."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._received = connected, b""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: AnyJoinMessage) -> None:
        try:
            self._socket.settimeout(SEND_S)
            self._socket.sendall(_encode(message) + b"\n")
        except OSError as error:
            raise JoinConnectionClosed(str(error)) from None

    def receive(self, wait_s: float = POLL_S) -> list[AnyJoinMessage]:
        """The messages that have arrived; empty after `wait_s` without one."""
        try:
            self._socket.settimeout(wait_s)
            data = self._socket.recv(_MAX_LINE)
        except TimeoutError:
            return []
        except OSError as error:
            raise JoinConnectionClosed(str(error)) from None
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or len(self._received) > _MAX_LINE:
            raise JoinConnectionClosed("closed by the other side" if not data else "a line was too long")
        try:
            return [_decode(line) for line in lines]
        except msgspec.MsgspecError as error:
            raise JoinConnectionClosed(f"not a message: {error}") from None

    def close(self) -> None:
        self._socket.close()

    @property
    def peer_names(self) -> frozenset[str] | None:
        """Names and addresses that the other side's certificate is for; None: it showed none."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return None
        found = self._socket.getpeercert() or {}
        return frozenset(str(entry[1]) for entry in found.get("subjectAltName", ()))


def tls_context(certs: str, *, server: bool) -> ssl.SSLContext:
    """Both sides show a certificate of the cluster's authority."""
    folder = Path(certs).expanduser()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(folder / CA)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
