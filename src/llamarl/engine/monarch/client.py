"""This process as a client of Monarch: one port on which everybody speaks, one thread that listens, one hook for faults.

A process has one such client for its whole life, since Monarch cannot be started a second time; jobs that follow each other
share it. Monarch ends a process by KeyboardInterrupt when nobody takes care of a fault, so the hook takes care of all.
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
from llamarl.engine.monarch.addresses import is_loopback, own_address, split_address
from llamarl.engine.monarch.protocol import Anything, StoreRequest, decode_word
from llamarl.errors import ConfigError
from llamarl.processes import describe_signal

_END = "end"


class Spoken(NamedTuple):
    executor: str
    incarnation: int
    rank: int
    number: int  # of all that this rank has said
    word: Anything | None  # None: nothing that makes sense


class Pulse(NamedTuple):
    host: str
    life: int
    version: str
    clock_s: float  # monotonic, of that host


class ProcessDeath(NamedTuple):
    name: str  # of the rank, or of a host
    reason: str


class MeshFault(NamedTuple):
    """What Monarch itself has noticed."""

    mesh: str
    ranks: tuple[int, ...]
    reason: str


Heard = Spoken | Pulse | ProcessDeath | MeshFault
_listening: list[queue.SimpleQueue[Heard]] = []


class Client:
    """`serve` is called by the listening thread for questions that cannot wait for the driver."""

    def __init__(self, settings: EngineConfig, serve: Callable[[Spoken, StoreRequest], None]) -> None:
        _open_transport(settings)
        monarch.actor.unhandled_fault_hook = _take_fault
        self.port: Any
        self.port, self._receiver = Channel.open()
        self._serve = serve
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        _listening.append(self._heard)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def next(self, wait_s: float) -> Heard | None:
        try:
            return self._heard.get(timeout=wait_s) if wait_s else self._heard.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        _listening.remove(self._heard)
        self.port.send(_END)
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        while (heard := self._receiver.recv().get()) != _END:
            if len(heard) != len(Spoken._fields):
                self._heard.put(Pulse(*heard) if len(heard) == len(Pulse._fields) else ProcessDeath(*heard))
                continue
            executor, incarnation, rank, number, data = heard
            spoken = Spoken(executor, incarnation, rank, number, _decode(data))
            if isinstance(spoken.word, StoreRequest):
                self._serve(spoken, spoken.word)
            self._heard.put(spoken)


def _decode(data: bytes) -> Anything | None:
    try:
        word: Anything = decode_word(data)
    except (msgspec.MsgspecError, TypeError):
        return None
    return word


def _open_transport(settings: EngineConfig) -> None:
    """Unix sockets for workers of our own; where hosts are named, an address that they can reach."""
    transport = "ipc"
    if settings.hosts:
        first, _ = split_address("engine.hosts", settings.all_hosts[0].address)
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
    """Monarch greets on stderr when it starts, where a user expects errors."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _take_fault(failure: MeshFailure) -> None:
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
    """In the words that the other engines use."""
    if found := re.search(r"Killed\(sig=(\d+)", text):
        return describe_signal(int(found[1]))
    if found := re.search(r"exited with non-zero code (\d+)", text):
        return f"exited with code {found[1]}"
    return " ".join(text.split())[:300]
