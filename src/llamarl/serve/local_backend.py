"""A model folder as a backend: the decoder in a process of its own (`decoder_process.py`), fed from the event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from llamarl.errors import InputError, JobFailed
from llamarl.generate.llm import open_model
from llamarl.io.frames import BadFrame, FrameReader, encode_frame
from llamarl.model.tokenizer import Tokenizer
from llamarl.processes import PYTHON, describe_signal
from llamarl.serve.backend import Ask, BackendStats, Piece, Scores
from llamarl.serve.decoder_messages import (
    BeginAnswer,
    Command,
    DecoderEnds,
    DecoderNews,
    DecoderReady,
    DropAnswer,
    ScoreTokens,
    StartDecoder,
    decode_told,
    encode,
)
from llamarl.serve.refusals import RequestRefused

_READ_BYTES = 1 << 20
_END_S = 10.0
_AT_ONCE = 8  # pieces delivered in one round of the event loop


class PieceInbox:
    """What has arrived for one request and was not read yet; used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: int) -> None:
        self._loop, self._missing = loop, answers
        self._arrived: deque[Piece | RequestRefused] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will arrive."""
        return self._missing <= 0

    def put(self, item: Piece | RequestRefused) -> None:
        if isinstance(item, RequestRefused):
            self._missing = 0
        elif item.finish is not None:
            self._missing -= 1
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Piece | RequestRefused | None:
        """The next item; None after the last one."""
        while not self._arrived:
            if self.done:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._arrived.popleft()


class LocalBackend:
    """Answers from a model folder. `start` before the event loop runs, and `attach` on it."""

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str,
        device: str = "auto",
        dtype: str = "auto",
        slots: int = 0,
        max_length: int = 0,
        seed: int = 0,
    ) -> None:
        """`device` and `dtype` as in `LLM`. `slots`: answers sampled at once; 0: 256 on a GPU, 16 on a CPU, where every step
        computes all of them. `max_length`: longest prompt and answer together; 0: what the model allows, but at most 16,384
        tokens on a GPU and 2,048 on a CPU."""
        self.opened = open_model(folder)
        self._name = name
        self._start = StartDecoder(str(self.opened.folder), device, dtype, slots, max_length, seed)
        self._inboxes: dict[int, PieceInbox] = {}
        self._scoring: dict[int, asyncio.Future[Scores]] = {}
        self._ordinals = itertools.count()
        self._stats, self._ready = BackendStats(), DecoderReady("", "", 0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader, self._unsent = FrameReader(), bytearray()
        self._arrived: deque[tuple[int, Piece]] = deque()  # not delivered yet
        self.failure = ""  # why nothing is answered any more
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self._name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.opened.tokenizer

    @property
    def max_positions(self) -> int:
        return self._ready.max_length

    @property
    def vocab_size(self) -> int:
        return self.opened.shape.vocab_size

    @property
    def version(self) -> int:
        return 0

    @property
    def stats(self) -> BackendStats:
        return self._stats

    @property
    def device(self) -> str:
        return self._ready.device

    @property
    def precision(self) -> str:
        return self._ready.precision

    def start(self) -> None:
        """Start the decoder's process and wait until the weights are read. Raises InputError for what the user can mend."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [*PYTHON, "-m", "llamarl.serve.decoder_process", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._socket.sendall(encode_frame(encode(self._start)))
        while not self._ready.max_length and not self.failure:
            self._receive(0)
        if self.failure:
            self.close()
            raise JobFailed(f"the model could not be loaded: {self.failure}")

    def close(self) -> None:
        """End the process. Requests that are not answered yet are refused."""
        if self._process is None:
            return
        self._detach()
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # in the middle of a step that does not end
            self._process.kill()
            self._process.wait()
        self._process = None
        self._fail("the server ends")

    def attach(self) -> None:
        """Listen to the decoder on the running event loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._detach()
            self._loop = loop
            loop.add_reader(self._socket, self._receive, socket.MSG_DONTWAIT)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._loop = None

    # On the event loop

    async def ask(self, ask: Ask) -> AsyncIterator[Piece]:
        self._check_alive()
        ordinal, inbox = next(self._ordinals), PieceInbox(asyncio.get_running_loop(), ask.sampling.samples)
        self._inboxes[ordinal] = inbox
        self._send(BeginAnswer(ordinal, ask))
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, RequestRefused):
                    raise item
                yield item
        finally:
            del self._inboxes[ordinal]
            if not inbox.done:
                self._send(DropAnswer(ordinal))

    async def score(self, tokens: Sequence[int], top: int) -> Scores:
        self._check_alive()
        ordinal, future = next(self._ordinals), asyncio.get_running_loop().create_future()
        self._scoring[ordinal] = future
        self._send(ScoreTokens(ordinal, list(tokens), top))
        try:
            found: Scores = await future
        finally:
            del self._scoring[ordinal]
        return found

    def _check_alive(self) -> None:
        if self.failure:
            raise _gone()
        self.attach()

    def _send(self, command: Command) -> None:
        if not self.failure:
            self._unsent += encode_frame(encode(command))
            self._flush()

    def _flush(self) -> None:
        """Send what the socket takes, and the rest as soon as it takes more."""
        assert self._loop is not None
        try:
            del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # its end is noticed by reading
        if self._unsent:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self, flags: int) -> None:
        try:
            data = self._socket.recv(_READ_BYTES, flags)
            told = [decode_told(payload) for payload in self._reader.feed(data)]
        except BlockingIOError:
            return
        except (OSError, BadFrame) as error:
            self._fail(str(error))
            return
        for one in told:
            match one:
                case DecoderReady():
                    self._ready = one
                case DecoderNews():
                    self._hand_out(one)
                case DecoderEnds(reason, by_user):
                    if by_user:
                        self.close()
                        raise InputError(reason)
                    self._fail(reason)
        if not data:
            self._fail(self._how_it_ended())

    def _hand_out(self, news: DecoderNews) -> None:
        self._stats = news.stats
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._arrived.extend(news.pieces)
        for ordinal, reason in news.refused:
            if inbox := self._inboxes.get(ordinal):
                inbox.put(RequestRefused(400, reason))
        for ordinal, scores in news.scores:
            future = self._scoring.get(ordinal)
            if future is not None and not future.done():
                future.set_result(scores)

    def _deliver(self) -> None:
        """A few pieces in each round of the loop: clients whose answers are written ask again while others are being written.
        Otherwise the decoder would have nothing to do while a whole wave of answers that end together is written."""
        for ordinal, piece in (self._arrived.popleft() for _ in range(min(_AT_ONCE, len(self._arrived)))):
            if inbox := self._inboxes.get(ordinal):
                inbox.put(piece)
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._deliver)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return f"its process was {describe_signal(-code)}" if code < 0 else f"its process exited with code {code}"

    def _fail(self, reason: str) -> None:
        if self.failure:
            return
        self.failure = reason
        self._detach()
        for inbox in self._inboxes.values():
            inbox.put(_gone())
        for future in self._scoring.values():
            if not future.done():
                future.set_exception(_gone())
        if self._process is not None:
            self.on_failure()


def _gone() -> RequestRefused:
    return RequestRefused(503, "the model does not answer any more; see the server's log")
