"""The life of one executor rank in its own process: build, say so, then answer messages and work in slices between them."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path

import msgspec
import torch

from llamarl.build import Site, load_builder
from llamarl.engine.local.frames import BadFrame, FrameReader, encode_frame
from llamarl.engine.local.heap import keep_freed_memory
from llamarl.engine.local.ranks import Ranks
from llamarl.engine.local.wire import Birth, Envelope, encode
from llamarl.engine.runner import Runner
from llamarl.executors.executor import Executor
from llamarl.messages import Failed, Message, Stop, Up, decode_message
from llamarl.weights.slotfile import SlotFile

_READ_BYTES = 1 << 20
_SIGN_OF_LIFE_S = 1.0


class Closed(Exception):
    """The engine hung up."""


class Line:
    """This rank's end of its socket pair."""

    def __init__(self, connection: socket.socket, frame_s: float) -> None:
        self._connection, self._frame_s = connection, frame_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._reader = FrameReader()
        self._inbox: deque[Message] = deque()
        self._sending = threading.Lock()  # weights may be published, and reported, by a thread of their own
        self.last_sent_s = 0.0

    def next(self, *, wait: bool) -> Message | None:
        while not self._inbox:
            if not self._poll.poll(self._patience_ms() if wait else 0):
                self._check_deadline()
                if not wait:
                    return None
                continue
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise Closed
            self._inbox.extend(_decode(payload) for payload in self._reader.feed(data))
        return self._inbox.popleft()

    def _patience_ms(self) -> float | None:
        """Between messages there is no hurry; in the middle of one there is."""
        return None if self._reader.incomplete_since_s is None else self._frame_s * 1000

    def _check_deadline(self) -> None:
        since_s = self._reader.incomplete_since_s
        if since_s is not None and time.monotonic() - since_s > self._frame_s:
            raise BadFrame(f"a frame that took more than {self._frame_s:g} s")

    def send(self, envelope: Envelope) -> None:
        with self._sending:
            self._connection.sendall(encode_frame(encode(envelope)))
            self.last_sent_s = time.monotonic()


def _decode(payload: bytes) -> Message:
    try:
        message: Message = decode_message(payload)
    except msgspec.MsgspecError as error:
        raise BadFrame(f"something that is no message: {error}") from None
    return message


def live(birth: Birth, fds: list[int]) -> None:
    socket_fd, log_fd, meeting_fd, *slot_fds = fds
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    line = Line(socket.socket(fileno=socket_fd), birth.config.engine.frame_s)
    try:
        keep_freed_memory()
        torch.set_num_threads(birth.threads)
        ranks = Ranks.join(birth.rank, birth.num_ranks, meeting_fd)
        runner = Runner(_build(birth, SlotFile.by_role(birth.slots, slot_fds), ranks, line))
        if birth.rank == 0:
            _serve(runner, line, ranks)
        else:
            _follow(runner, line, ranks)
    except (Closed, BrokenPipeError, ConnectionResetError):
        pass  # the engine is gone, or does not want this executor any more
    except BadFrame as error:
        line.send(Envelope((Failed(f"the engine sent {error}"),), ()))
    except (Exception, SystemExit) as error:  # the border to the executor's code: what happens there becomes one report
        traceback.print_exc(file=sys.stderr)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        line.send(Envelope((Failed(reason),), ()))


def _build(birth: Birth, slots: dict[str, SlotFile], ranks: Ranks, line: Line) -> Executor:
    site = Site(
        birth.config,
        birth.executor,
        slots,
        birth.weights_source,
        Path(birth.snapshot) if birth.snapshot else None,
        ranks.rank,
        ranks.count,
        tell_engine=lambda report: line.send(Envelope((report,), ())),
    )
    return load_builder(birth.builder)(site)


def _serve(runner: Runner, line: Line, ranks: Ranks) -> None:
    """Rank 0: the only one the engine talks to. It tells the others what to do, and it alone reports."""
    line.send(Envelope((Up(),), ()))
    while True:
        message = line.next(wait=runner.idle)
        ranks.tell(message)
        if isinstance(message, Stop):
            return
        reports = runner.handle(message) if message is not None else runner.work()
        if reports or time.monotonic() - line.last_sent_s > _SIGN_OF_LIFE_S:
            line.send(Envelope(tuple(reports), runner.take_spans()))


def _follow(runner: Runner, line: Line, ranks: Ranks) -> None:
    """Any other rank: does what rank 0 says, when it says so."""
    line.send(Envelope((Up(),), ()))
    while not isinstance(message := ranks.listen(), Stop):
        if message is not None:
            runner.handle(message)
        else:
            runner.work()
        runner.take_spans()
