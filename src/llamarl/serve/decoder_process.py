"""The process in which `llamarl serve` decodes: HTTP never holds up a GPU.

    python -m llamarl.serve.decoder_process FD PARENT

Commands come over a socket and are taken between two bursts: requests join the running batch and leave it as they end, or as
soon as their client is gone.
"""

from __future__ import annotations

import gc
import secrets
import select
import signal
import socket
import sys
from contextlib import suppress

import torch

from llamarl.errors import InputError
from llamarl.generate.decoder import ContinuousDecoder, StreamedTokens
from llamarl.generate.limits import Limits
from llamarl.generate.llm import LLM
from llamarl.generate.scoring import score_tokens
from llamarl.generate.sequences import GroupOptions
from llamarl.generate.stop_strings import StopStrings
from llamarl.io.frames import BadFrame, FrameReader, encode_frame
from llamarl.processes import die_with_parent
from llamarl.serve.backend import BackendStats, Finish, Piece, Scores
from llamarl.serve.decoder_messages import (
    BeginAnswer,
    Command,
    DecoderEnds,
    DecoderNews,
    DecoderReady,
    DropAnswer,
    ScoreTokens,
    StartDecoder,
    Told,
    decode_command,
    encode,
)
from llamarl.serve.versions import version_runs
from llamarl.types import (
    Completion,
    Problem,
    PromptGroup,
    Sampling,
    bytes_to_floats,
    bytes_to_tokens,
    tokens_to_bytes,
)

_GPU_SLOTS, _CPU_SLOTS = 256, 16
_GPU_LENGTH, _CPU_LENGTH = 16_384, 2_048
_DRAW_BITS = 62
_READ_BYTES = 1 << 20
_NOTHING = Problem("", "")


class ParentGone(Exception):
    """The HTTP side has closed its end."""


class ParentConnection:
    """This process's end of the socket. Nothing waits for the other side, which may be busy with answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._reader, self._unsent = connection, FrameReader(), bytearray()
        connection.setblocking(False)

    def receive(self, *, wait: bool) -> list[Command]:
        """Commands that have arrived; with `wait`, at least a part of one. Sends what could not be sent yet. Raises
        ParentGone."""
        if wait:
            self._wait_to_read()
        self._flush()
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            raise ParentGone from None
        if not data:
            raise ParentGone
        return [decode_command(payload) for payload in self._reader.feed(data)]

    def send(self, told: Told) -> None:
        self._unsent += encode_frame(encode(told))
        self._flush()

    def close(self) -> None:
        """After everything was sent."""
        with suppress(OSError):
            self._socket.setblocking(True)
            self._socket.sendall(self._unsent)

    def _wait_to_read(self) -> None:
        while True:
            unsent = [self._socket] if self._unsent else []
            readable, writable, _ = select.select([self._socket], unsent, [])
            if writable:
                self._flush()
            if readable:
                return

    def _flush(self) -> None:
        if self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                raise ParentGone from None


def limits_for(llm: LLM, start: StartDecoder) -> Limits:
    on_cpu = llm.device == "cpu"
    longest = start.max_length or min(llm.shape.max_positions, _CPU_LENGTH if on_cpu else _GPU_LENGTH)
    limits = Limits(
        slots=start.slots or (_CPU_SLOTS if on_cpu else _GPU_SLOTS),
        max_prompt_tokens=longest - 1,
        max_new_tokens=longest - 1,
        max_length=longest,
    )
    llm.check_cache(limits, "lower --slots or --max-model-len")
    return limits


class DecoderLoop:
    """Answers commands, for as long as the other side is there."""

    def __init__(self, llm: LLM, limits: Limits, seed: int, connection: ParentConnection) -> None:
        self._llm, self._connection = llm, connection
        self._decoder: ContinuousDecoder = llm.decoder(limits, seed=seed)
        self._decoder.version = 0
        self._streams: set[int] = set()  # groups whose pieces are told while they are sampled
        self._news, self._stats = DecoderNews(), BackendStats()

    def warm_up(self) -> None:
        """Answer one prompt, so that the first client does not wait for it."""
        self._decoder.add(PromptGroup(-1, _NOTHING, tokens_to_bytes([0, 0]), Sampling(max_new_tokens=1)))
        while not self._decoder.idle:
            self._decoder.step()

    def run(self) -> None:
        while True:
            for command in self._connection.receive(wait=not self._decoder.decoding):
                self._do(command)
            if self._decoder.decoding:
                self._step()
            self._tell()

    def _do(self, command: Command) -> None:
        match command:
            case BeginAnswer():
                self._begin(command)
            case DropAnswer(ordinal):
                self._streams.discard(ordinal)
                if self._decoder.holds(ordinal):
                    self._decoder.drop(ordinal)
            case ScoreTokens(ordinal, tokens, top):
                found = score_tokens(self._llm.model, tokens, top)
                self._news.scores.append((ordinal, Scores(logprobs=found.logprobs, ranks=found.ranks, top=found.top)))
            case StartDecoder():
                raise BadFrame("the decoder has started already")

    def _begin(self, command: BeginAnswer) -> None:
        ask, ordinal = command.ask, command.ordinal
        stop = StopStrings(self._llm.tokenizer, ask.stop, ask.stop_token_ids)
        draws = secrets.randbits(_DRAW_BITS) if ask.seed is None else ask.seed % (1 << _DRAW_BITS)
        options = GroupOptions(draws=draws, stop=stop or None, stream=ask.stream)
        try:
            self._decoder.add(PromptGroup(ordinal, _NOTHING, tokens_to_bytes(ask.tokens), ask.sampling), options)
        except ValueError as error:
            self._news.refused.append((ordinal, str(error)))
            return
        if ask.stream:
            self._streams.add(ordinal)

    def _step(self) -> None:
        for group in self._decoder.step():
            if group.ordinal not in self._streams:
                pieces = (_whole_piece(index, one) for index, one in enumerate(group.completions))
                self._news.pieces.extend((group.ordinal, piece) for piece in pieces)
        for news in self._decoder.take_streamed():
            ordinal = news.key[0]
            self._news.pieces.append((ordinal, _piece_of_stream(news)))
            if not self._decoder.holds(ordinal):
                self._streams.discard(ordinal)

    def _tell(self) -> None:
        decoder, news = self._decoder, self._news
        news.stats = BackendStats(
            running=decoder.num_running, waiting=decoder.num_waiting, cache_share=decoder.cache_share
        )
        if news or news.stats != self._stats:
            self._connection.send(news)
            self._news, self._stats = DecoderNews(), news.stats


def _finish_of(completion: Completion) -> Finish:
    return "length" if completion.truncated else "stop"


def _piece_of_stream(news: StreamedTokens) -> Piece:
    sampled = news.sampled
    return Piece(
        index=news.key[1],
        tokens=sampled.tokens,
        logprobs=sampled.logprobs,
        versions=version_runs(sampled.versions),
        finish=None if news.completion is None else _finish_of(news.completion),
    )


def _whole_piece(index: int, completion: Completion) -> Piece:
    return Piece(
        index=index,
        tokens=bytes_to_tokens(completion.tokens).tolist(),
        logprobs=bytes_to_floats(completion.behavior_logprobs).tolist(),
        versions=completion.versions,
        finish=_finish_of(completion),
    )


def serve_decoder(connection: ParentConnection) -> None:
    """Loads what the first command says and answers all others."""
    while not (commands := connection.receive(wait=True)):
        pass
    (start,) = commands
    assert isinstance(start, StartDecoder)
    try:
        llm = LLM(start.folder, device=start.device, dtype=start.dtype)
        limits = limits_for(llm, start)
        if ":" in llm.device:
            torch.cuda.set_device(llm.device)
        loop = DecoderLoop(llm, limits, start.seed, connection)
        loop.warm_up()
    except InputError as error:
        connection.send(DecoderEnds(str(error), by_user=True))
        return
    gc.freeze()  # what is there now stays; looking through it again and again would hold up answers
    connection.send(DecoderReady(llm.device, llm.precision, limits.length))
    loop.run()


def main() -> None:
    fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which lets answers end
    connection = ParentConnection(socket.socket(fileno=fd))
    try:
        serve_decoder(connection)
    except ParentGone:
        return
    except Exception as error:  # on the device, or out of memory: nobody can be answered any more
        connection.send(DecoderEnds(f"{type(error).__name__}: {error}"))
    connection.close()


if __name__ == "__main__":
    main()
