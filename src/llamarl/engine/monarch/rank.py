"""The actor that is one rank of an executor.

All endpoints return at once, since an actor handles one message at a time. The executor runs in a thread of its own, so that
the actor can always take the next message.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, current_rank, endpoint

from llamarl.builders.context import BuildContext
from llamarl.builders.registry import load_builder
from llamarl.engine import rank_loop
from llamarl.engine.compiled_code import compiled_code
from llamarl.engine.envelope import Envelope
from llamarl.engine.malloc import keep_freed_memory
from llamarl.engine.monarch.fork_server import SLOTS
from llamarl.engine.monarch.protocol import (
    AnyRankMessage,
    RankReport,
    RankSpec,
    RankStarted,
    RankStopped,
    decode_spec,
    encode,
)
from llamarl.engine.monarch.rendezvous_store import StoreClient
from llamarl.engine.monarch.weight_rendezvous import EngineRendezvous
from llamarl.engine.rank_loop import ConnectionClosed
from llamarl.engine.ranks import Ranks
from llamarl.executors.executor import Executor
from llamarl.messages import Failed, Message, decode_message
from llamarl.process_groups import let_ranks_share_gpus
from llamarl.weights.slot_file import SlotFile

_RENDEZVOUS_S = 300.0


class PortConnection:
    """This rank's end: messages come in by the actor's endpoint, and go out through a port of the engine."""

    def __init__(self, port: Any, spec: RankSpec, rank: int) -> None:
        self._port, self._identity = port, (spec.executor, spec.incarnation, rank)
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._received = self._sent = 0
        self._sending = threading.Lock()  # a thread of its own may publish weights and report that
        self.last_sent_s = 0.0

    def deliver(self, number: int, messages: list[bytes]) -> None:
        """Take the next parcel. One that is out of order, or follows a lost one, ends this rank."""
        if number != self._received:
            self.send_message(RankReport(Envelope((Failed(f"parcel {self._received} of the engine was lost"),), ())))
        self._received += 1
        for data in messages:
            self._inbox.put(data)

    def next(self, *, wait: bool) -> Message | None:
        try:
            data = self._inbox.get(block=wait)
        except queue.Empty:
            return None
        message: Message = decode_message(data)
        return message

    def send(self, envelope: Envelope) -> None:
        self.send_message(RankReport(envelope))
        self.last_sent_s = time.monotonic()

    def send_message(self, message: AnyRankMessage) -> None:
        with self._sending:
            self._port.send((*self._identity, self._sent, encode(message)))
            self._sent += 1


class RankActor(Actor):
    """The actor of one rank: its endpoints feed the thread in which the executor runs."""

    def __init__(self, port: Any, spec: bytes) -> None:
        self._spec = decode_spec(spec)
        local = current_rank()["ranks"]
        self._rank, self._gpu = self._spec.first_rank + local, self._spec.gpus[local]
        self._connection = PortConnection(port, self._spec, self._rank)
        self._stores = StoreClient(self._connection.send_message)
        self._rendezvous = EngineRendezvous(self._spec, self._rank, self._stores, self._connection.send_message)
        threading.Thread(target=self._run, daemon=True).start()

    @endpoint
    def deliver(self, number: int, messages: list[bytes]) -> None:
        self._connection.deliver(number, messages)

    @endpoint
    def answer(self, number: int, value: bytes) -> None:
        self._stores.on_answer(number, value)

    @endpoint
    def serve_readers(self, rendezvous: str, num_readers: int) -> None:
        self._rendezvous.serve_readers(rendezvous, num_readers)

    @endpoint
    def on_reader_gone(self, rendezvous: str) -> None:
        self._rendezvous.on_reader_gone(rendezvous)

    def _run(self) -> None:
        spec, connection = self._spec, self._connection
        _write_to(Path(spec.log))
        connection.send_message(RankStarted(os.getpid()))
        try:
            keep_freed_memory()
            torch.set_num_threads(spec.threads)
            rendezvous = f"{spec.executor}.{spec.incarnation}"
            if spec.config.engine.share_gpus:
                let_ranks_share_gpus()
            ranks = Ranks.join(
                self._rank,
                spec.num_ranks,
                lambda: self._stores.store(rendezvous, _RENDEZVOUS_S),
                spec.interface,
                nccl_interface=spec.network if spec.num_writers else "",
            )
            with compiled_code(keep=spec.config.engine.keep_compiled):
                rank_loop.run_rank(self._build, connection, ranks)
            connection.send_message(RankStopped())
        except ConnectionClosed:
            pass
        except (Exception, SystemExit) as error:  # the border to the executor's code
            rank_loop.tell_failure(connection, error)

    def _build(self) -> Executor:
        spec = self._spec
        context = BuildContext(
            spec.config,
            spec.executor,
            inherited_slots(),
            spec.weights_source,
            Path(spec.snapshot) if spec.snapshot else None,
            self._rank,
            spec.num_ranks,
            tell_engine=lambda report: rank_loop.tell(self._connection, report),
            gpu=self._gpu,
            first_gpus=spec.first_gpus,
            rendezvous=self._rendezvous if spec.num_writers else None,
        )
        return load_builder(spec.builder)(context)


def inherited_slots() -> dict[str, SlotFile]:
    """The slot files that the engine's own worker passed on, where all ranks are on one host."""
    entries = [entry.split(":") for entry in os.environ.get(SLOTS, "").split(";") if entry]
    return {role: SlotFile([int(fd) for fd in fds.split(",")]) for role, fds in entries}


def _write_to(log: Path) -> None:
    """Print to this log; on a host that does not share the run folder, to where the worker prints."""
    with suppress(OSError):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
