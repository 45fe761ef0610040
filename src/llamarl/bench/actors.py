"""Objects in forked processes that are called by name; for benchmarks, and for tests that kill or stop them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import torch

from llamarl.io.frames import FrameReader, encode_frame

_READ_BYTES = 1 << 20


class Actor:
    """A child process that holds the object made by `make`. `call` runs one of its methods there and returns the result, or
    raises RuntimeError with the name of what it raised."""

    def __init__(self, make: Callable[[], object], threads: int = 1, answer_s: float = 60.0) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(answer_s)
        self.pid = os.fork()
        if self.pid == 0:
            self._connection.close()
            try:
                _live(make, theirs, threads)
            finally:
                os._exit(0)
        theirs.close()

    def begin(self, method: str, *args: object) -> None:
        """Start a call; `end` waits for its result."""
        _send(self._connection, [method, list(args)])

    def end(self) -> Any:
        kind, value = _receive(self._connection)
        if kind:
            raise RuntimeError(f"{kind}: {value}")  # exceptions are not sent between processes, only their names
        return value

    def call(self, method: str, *args: object) -> Any:
        self.begin(method, *args)
        return self.end()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._connection.close()
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Actors(list[Actor]):
    """A list of actors that are all killed on leaving the `with` block."""

    def __enter__(self) -> Actors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self:
            actor.close()

    def call_all(self, method: str, *args: object) -> list[Any]:
        """Call a method of all actors at the same time."""
        for actor in self:
            actor.begin(method, *args)
        return [actor.end() for actor in self]


def _live(make: Callable[[], object], connection: socket.socket, threads: int) -> None:
    torch.set_num_threads(threads)
    made = make()
    while True:
        method, args = _receive(connection)
        try:
            _send(connection, ["", getattr(made, method)(*args)])
        except Exception as error:  # the border between processes: the caller raises it again
            _send(connection, [type(error).__name__, str(error)])


def _send(connection: socket.socket, value: object) -> None:
    connection.sendall(encode_frame(msgspec.msgpack.encode(value)))


def _receive(connection: socket.socket) -> Any:
    """Receive one message. There is only one at a time, since both sides take turns."""
    reader = FrameReader()
    while data := connection.recv(_READ_BYTES):
        for payload in reader.feed(data):
            return msgspec.msgpack.decode(payload)
    raise ConnectionError("the actor is gone")
