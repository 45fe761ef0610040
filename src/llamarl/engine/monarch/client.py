"""This process as a client of Monarch: one port that all ranks send to, one thread that listens, one hook for faults.

Monarch cannot be started twice in a process; jobs that follow each other share it. It raises KeyboardInterrupt in a process
for a fault that nobody handles, so the hook handles all.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import monarch.actor
import msgspec
from monarch.actor import Channel, MeshFailure, context, enable_transport

from llamarl.config import EngineConfig
from llamarl.config.engine import is_loopback
from llamarl.engine.monarch.addresses import own_address, split_address
from llamarl.engine.monarch.protocol import AnyRankMessage, StoreRequest, decode_rank_message
from llamarl.errors import ConfigError
from llamarl.processes import describe_signal

_END = "end"


class FromRank(NamedTuple):
    """A message from a rank."""

    executor: str
    incarnation: int
    rank: int
    number: int  # counts the messages of this rank
    message: AnyRankMessage | None  # None: it could not be decoded


class Pulse(NamedTuple):
    """The answer of a host's agent to a heartbeat."""

    host: str
    attempt: int  # to reach the host, in which the agent was started
    version: str
    clock_s: float  # the monotonic clock of that host


class ProcessDeath(NamedTuple):
    """The end of a rank, or of the fork server of a host."""

    name: str  # of the rank, or of the host
    reason: str


class MeshFault(NamedTuple):
    """A fault that Monarch itself has noticed."""

    mesh: str
    ranks: tuple[int, ...]
    reason: str


ClientEvent = FromRank | Pulse | ProcessDeath | MeshFault
_listening: list[queue.SimpleQueue[ClientEvent]] = []


class Client:
    """Receives everything for one engine. The listening thread calls `serve` for requests that cannot wait for the driver."""

    def __init__(self, settings: EngineConfig, serve: Callable[[FromRank, StoreRequest], None]) -> None:
        _open_transport(settings)
        monarch.actor.unhandled_fault_hook = _on_fault
        self.port: Any
        self.port, self._receiver = Channel.open()
        self._serve = serve
        self._events: queue.SimpleQueue[ClientEvent] = queue.SimpleQueue()
        _listening.append(self._events)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def next(self, wait_s: float) -> ClientEvent | None:
        try:
            return self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        _listening.remove(self._events)
        self.port.send(_END)
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        while (heard := self._receiver.recv().get()) != _END:
            if len(heard) != len(FromRank._fields):
                self._events.put(Pulse(*heard) if len(heard) == len(Pulse._fields) else ProcessDeath(*heard))
                continue
            executor, incarnation, rank, number, data = heard
            received = FromRank(executor, incarnation, rank, number, _decode(data))
            if isinstance(received.message, StoreRequest):
                self._serve(received, received.message)
            self._events.put(received)


def _decode(data: bytes) -> AnyRankMessage | None:
    try:
        message: AnyRankMessage = decode_rank_message(data)
    except (msgspec.MsgspecError, TypeError):
        return None
    return message


def _open_transport(settings: EngineConfig) -> None:
    """Unix sockets for a worker of our own; where hosts are named, an address that they can reach."""
    transport = "ipc"
    if settings.hosts:
        first, _ = split_address("engine.hosts", settings.all_hosts[0].address)
        if is_loopback(first) and settings.join:
            first, _ = split_address("engine.join", settings.join)
        own = "127.0.0.1" if is_loopback(first) else own_address(first)
        transport = f"{'tls' if settings.certs else 'tcp'}://{own}:0"
    try:
        enable_transport(transport)
    except RuntimeError as error:
        raise ConfigError(f"engine: this process has used Monarch with another transport before ({error})") from None
    with _without_banner():
        context()


@contextmanager
def _without_banner() -> Iterator[None]:
    """Suppress what Monarch prints on stderr when it starts, where users expect errors."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _on_fault(failure: MeshFailure) -> None:
    text = str(failure)
    ranks = re.search(r"crashed_ranks=\[([\d, ]*)\]", text)
    fault = MeshFault(
        failure.mesh_name.rpartition("-")[0],
        tuple(int(rank) for rank in ranks[1].split(",") if rank.strip()) if ranks else (),
        _reason(text),
    )
    for heard in list(_listening):
        heard.put(fault)


def _reason(text: str) -> str:
    """The reason of a fault, worded as by the other engines."""
    if found := re.search(r"Killed\(sig=(\d+)", text):
        return describe_signal(int(found[1]))
    if found := re.search(r"exited with non-zero code (\d+)", text):
        return f"exited with code {found[1]}"
    return " ".join(text.split())[:300]
