"""The job's ear for workers that want to join: accepts connections, one thread for each, and queues what they say."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from contextlib import suppress
from typing import NamedTuple

from llamarl.engine.monarch.addresses import split_address
from llamarl.engine.monarch.join_protocol import (
    AnyJoinMessage,
    JoinConnection,
    JoinConnectionClosed,
    tls_context,
)
from llamarl.errors import ConfigError

_HANDSHAKE_S = 5.0
_MAX_CONNECTIONS = 4096


class JoinPeer:
    """A connected worker. `send` and `close` may be called by any thread; the connection's own thread carries them out."""

    def __init__(self) -> None:
        self.names: frozenset[str] | None = None  # names in its certificate; None: it showed none, on loopback
        self._outgoing: queue.SimpleQueue[AnyJoinMessage | None] = queue.SimpleQueue()

    def send(self, message: AnyJoinMessage) -> None:
        self._outgoing.put(message)

    def close(self) -> None:
        """Close the connection after what was sent before."""
        self._outgoing.put(None)

    def flush(self, connection: JoinConnection) -> bool:
        """Send what is due; returns whether the connection stays open."""
        while True:
            try:
                message = self._outgoing.get_nowait()
            except queue.Empty:
                return True
            if message is None:
                return False
            connection.send(message)


class Heard(NamedTuple):
    """Something that a worker said; None: it has hung up."""

    peer: JoinPeer
    message: AnyJoinMessage | None


class JoinListener:
    """Listens at `engine.join`. Beyond loopback, whoever shows no certificate of the cluster is not heard."""

    def __init__(self, address: str, certs: str) -> None:
        host, port = split_address("engine.join", address)
        self._context = tls_context(certs, server=True) if certs else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise ConfigError(f"engine.join: cannot listen on {address}: {error.strerror or error}") from None
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._peers: set[JoinPeer] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        found: int = self._socket.getsockname()[1]
        return found

    def heard(self) -> list[Heard]:
        """What was said since the last call, in order."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._heard.get_nowait())
        return found

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        for peer in list(self._peers):
            peer.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return  # closed
            if len(self._peers) >= _MAX_CONNECTIONS:
                connected.close()
                continue
            peer = JoinPeer()
            self._peers.add(peer)
            threading.Thread(target=self._serve, args=(peer, connected), daemon=True).start()

    def _serve(self, peer: JoinPeer, connected: socket.socket) -> None:
        try:
            connected.settimeout(_HANDSHAKE_S)
            if self._context is not None:
                connected = self._context.wrap_socket(connected, server_side=True)
            connection = JoinConnection(connected)
            peer.names = connection.peer_names
            while peer.flush(connection):
                for message in connection.receive():
                    self._heard.put(Heard(peer, message))
        except (JoinConnectionClosed, ssl.SSLError, OSError):
            pass
        finally:
            connected.close()
            self._peers.discard(peer)
            self._heard.put(Heard(peer, None))
