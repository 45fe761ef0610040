"""The actor that is one rank of an executor.

All endpoints are plain ones and return at once: an actor handles one message at a time. The executor itself lives in a
thread of its own, so that the actor can always take the next message.
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

from llamarl.builders.registry import load_builder
from llamarl.builders.site import Site
from llamarl.engine import rank_loop
from llamarl.engine.envelope import Envelope
from llamarl.engine.malloc import keep_freed_memory
from llamarl.engine.monarch.fork_server import SLOTS
from llamarl.engine.monarch.protocol import (
    Anything,
    RankReport,
    RankSpec,
    RankStarted,
    RankStopped,
    decode_birth,
    encode,
)
from llamarl.engine.monarch.rendezvous_store import Asking
from llamarl.engine.monarch.weight_rendezvous import EngineRendezvous
from llamarl.engine.rank_loop import ConnectionClosed
from llamarl.engine.ranks import Ranks
from llamarl.executors.executor import Executor
from llamarl.messages import Failed, Message, decode_message
from llamarl.weights.slot_file import SlotFile

_MEETING_S = 300.0


class PortConnection:
    """Messages come in by the actor's endpoint, words go out through a port of the engine."""

    def __init__(self, port: Any, birth: RankSpec, rank: int) -> None:
        self._port, self._identity = port, (birth.executor, birth.incarnation, rank)
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._received = self._sent = 0
        self._sending = threading.Lock()  # weights may be published, and reported, by a thread of their own
        self.last_sent_s = 0.0

    def deliver(self, number: int, messages: list[bytes]) -> None:
        """What arrives out of order, or after something that did not arrive, ends this rank."""
        if number != self._received:
            self.say(RankReport(Envelope((Failed(f"parcel {self._received} of the engine was lost"),), ())))
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
        self.say(RankReport(envelope))
        self.last_sent_s = time.monotonic()

    def say(self, word: Anything) -> None:
        with self._sending:
            self._port.send((*self._identity, self._sent, encode(word)))
            self._sent += 1


class RankActor(Actor):
    def __init__(self, port: Any, birth: bytes) -> None:
        self._birth = decode_birth(birth)
        local = current_rank()["ranks"]
        self._rank, self._gpu = self._birth.first_rank + local, self._birth.gpus[local]
        self._line = PortConnection(port, self._birth, self._rank)
        self._asking = Asking(self._line.say)
        self._meets = EngineRendezvous(self._birth, self._rank, self._asking, self._line.say)
        threading.Thread(target=self._live, daemon=True).start()

    @endpoint
    def deliver(self, number: int, messages: list[bytes]) -> None:
        self._line.deliver(number, messages)

    @endpoint
    def answer(self, number: int, value: bytes) -> None:
        self._asking.answered(number, value)

    @endpoint
    def meet(self, meeting: str, num_readers: int) -> None:
        self._meets.meet_readers(meeting, num_readers)

    @endpoint
    def part(self, meeting: str) -> None:
        self._meets.part(meeting)

    def _live(self) -> None:
        birth, line = self._birth, self._line
        _write_to(Path(birth.log))
        line.say(RankStarted(os.getpid()))
        try:
            keep_freed_memory()
            torch.set_num_threads(birth.threads)
            meeting = f"{birth.executor}.{birth.incarnation}"
            ranks = Ranks.join(
                self._rank, birth.num_ranks, lambda: self._asking.store(meeting, _MEETING_S), birth.interface
            )
            rank_loop.run_rank(self._build, line, ranks)
            line.say(RankStopped())
        except ConnectionClosed:
            pass
        except (Exception, SystemExit) as error:  # the border to the executor's code
            rank_loop.tell_failure(line, error)

    def _build(self) -> Executor:
        birth = self._birth
        site = Site(
            birth.config,
            birth.executor,
            inherited_slots(),
            birth.weights_source,
            Path(birth.snapshot) if birth.snapshot else None,
            self._rank,
            birth.num_ranks,
            tell_engine=lambda report: rank_loop.tell(self._line, report),
            gpu=self._gpu,
            first_gpus=birth.first_gpus,
            meets=self._meets if birth.num_writers else None,
        )
        return load_builder(birth.builder)(site)


def inherited_slots() -> dict[str, SlotFile]:
    """Those that the engine's own worker passed on: on one host only."""
    entries = [entry.split(":") for entry in os.environ.get(SLOTS, "").split(";") if entry]
    return {role: SlotFile([int(fd) for fd in fds.split(",")]) for role, fds in entries}


def _write_to(log: Path) -> None:
    """Where the host does not share the run folder, what it prints goes to where the worker's output goes."""
    with suppress(OSError):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
