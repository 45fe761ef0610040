"""A model folder as a backend: the decoder in a thread of its own, fed from the event loop.

Requests join the running batch between two bursts and leave it as they end, or as soon as their client is gone. After each
step everything that is new goes to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from llamarl.generate.decoder import ContinuousDecoder, Limits, StreamedTokens
from llamarl.generate.llm import LLM
from llamarl.generate.scheduler import GroupOptions, Sampled
from llamarl.generate.scoring import TokenScores, score_tokens
from llamarl.generate.stop_strings import StopStrings
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.backend import Ask, BackendStats, Finish, Piece, Scores
from llamarl.serve.refusals import RequestRefused
from llamarl.serve.versions import version_runs
from llamarl.types import (
    Completion,
    CompletionGroup,
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
_NOTHING = Problem("", "")

Work = Callable[[], None]


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
    """Answers from a model folder in this process; see the module's docstring."""

    def __init__(self, llm: LLM, *, name: str, slots: int = 0, max_length: int = 0, seed: int = 0) -> None:
        """`slots`: answers sampled at once; 0: 256 on a GPU, 16 on a CPU, where every step computes all of them.
        `max_length`: longest prompt and answer together; 0: what the model allows, but at most 16,384 tokens on a GPU and
        2,048 on a CPU."""
        on_cpu = llm.device == "cpu"
        longest = max_length or min(llm.shape.max_positions, _CPU_LENGTH if on_cpu else _GPU_LENGTH)
        limits = Limits(
            slots=slots or (_CPU_SLOTS if on_cpu else _GPU_SLOTS),
            max_prompt_tokens=longest - 1,
            max_new_tokens=longest - 1,
            max_length=longest,
        )
        llm.check_cache(limits, "lower --slots or --max-model-len")
        self._llm, self._name, self._limits, self._seed = llm, name, limits, seed
        self._work: SimpleQueue[Work] = SimpleQueue()
        self._inboxes: dict[int, PieceInbox] = {}
        self._ordinals = itertools.count()
        self._stats, self._version = BackendStats(), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder: ContinuousDecoder | None = None
        self._closing = False
        self._scoring: set[asyncio.Future[TokenScores]] = set()
        self._streams: set[int] = set()  # groups whose pieces were told while they were sampled
        self.failure: BaseException | None = None  # why nothing is answered any more
        self.on_failure: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)

    @property
    def name(self) -> str:
        return self._name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def max_positions(self) -> int:
        return self._limits.length

    @property
    def vocab_size(self) -> int:
        return self._llm.shape.vocab_size

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> BackendStats:
        return self._stats

    def load(self) -> None:
        """Read the weights and answer one prompt, so that the first client does not wait for it."""
        self._use_device()
        decoder = self._llm.decoder(self._limits, seed=self._seed)
        decoder.version = self._version
        once = PromptGroup(next(self._ordinals), _NOTHING, tokens_to_bytes([0, 0]), Sampling(max_new_tokens=1))
        decoder.add(once)
        while not decoder.idle:
            decoder.step()
        self._decoder = decoder

    def start(self) -> None:
        """Begin to decode; to be called after `load`."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Requests that are not answered yet are refused."""
        self._closing = True
        self._work.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    # On the event loop

    async def ask(self, ask: Ask) -> AsyncIterator[Piece]:
        self._loop = loop = asyncio.get_running_loop()
        if self.failure is not None:
            raise _gone()
        ordinal, inbox = next(self._ordinals), PieceInbox(loop, ask.sampling.samples)
        self._inboxes[ordinal] = inbox
        self._work.put(lambda: self._add(ordinal, ask))
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, RequestRefused):
                    raise item
                yield item
        finally:
            del self._inboxes[ordinal]
            if not inbox.done:
                self._work.put(lambda: self._drop(ordinal))

    async def score(self, tokens: Sequence[int], top: int) -> Scores:
        self._loop = loop = asyncio.get_running_loop()
        if self.failure is not None:
            raise _gone()
        future: asyncio.Future[TokenScores] = loop.create_future()
        self._scoring.add(future)
        self._work.put(lambda: self._score(future, tokens, top))
        try:
            found = await future
        finally:
            self._scoring.discard(future)
        return Scores(logprobs=found.logprobs, ranks=found.ranks, top=found.top)

    def _hand_out(self, groups: list[CompletionGroup], streamed: list[StreamedTokens]) -> None:
        for news in streamed:
            if inbox := self._inboxes.get(news.key[0]):
                inbox.put(_piece_of_stream(news))
        for group in groups:
            if inbox := self._inboxes.get(group.ordinal):
                for index, completion in enumerate(group.completions):
                    inbox.put(_whole_piece(index, completion))

    def _refuse(self, ordinal: int, refusal: RequestRefused) -> None:
        if inbox := self._inboxes.get(ordinal):
            inbox.put(refusal)

    # In the decoder's thread

    def _run(self) -> None:
        try:
            self._use_device()
            assert self._decoder is not None, "load was not called"
            while not self._closing:
                self._take_work(self._decoder)
                if self._decoder.decoding:
                    self._step(self._decoder)
        except BaseException as error:  # an error on the device or out of memory: nobody can be answered any more
            self.failure = error
            self.on_failure()
        self._tell(self._end_all)

    def _use_device(self) -> None:
        """Every thread has a current GPU of its own; streams and events are made on it."""
        if ":" in self._llm.device:
            torch.cuda.set_device(self._llm.device)

    def _take_work(self, decoder: ContinuousDecoder) -> None:
        """Do what was asked for; without anything to decode, wait for it."""
        try:
            work = self._work.get(block=not decoder.decoding)
            while True:
                work()
                work = self._work.get_nowait()
        except Empty:
            pass

    def _step(self, decoder: ContinuousDecoder) -> None:
        groups = [group for group in decoder.step() if group.ordinal not in self._streams]
        streamed = decoder.take_streamed()
        self._streams -= {news.key[0] for news in streamed if not decoder.holds(news.key[0])}
        self._stats = BackendStats(
            running=decoder.num_running, waiting=decoder.num_waiting, cache_share=decoder.cache_share
        )
        if groups or streamed:
            self._tell(lambda: self._hand_out(groups, streamed))

    def _add(self, ordinal: int, ask: Ask) -> None:
        assert self._decoder is not None
        stop = StopStrings(self.tokenizer, ask.stop, ask.stop_token_ids)
        draws = secrets.randbits(_DRAW_BITS) if ask.seed is None else ask.seed % (1 << _DRAW_BITS)
        options = GroupOptions(draws=draws, stop=stop or None, stream=ask.stream)
        try:
            self._decoder.add(PromptGroup(ordinal, _NOTHING, tokens_to_bytes(ask.tokens), ask.sampling), options)
        except ValueError as error:
            refusal = RequestRefused(400, str(error))
            self._tell(lambda: self._refuse(ordinal, refusal))
            return
        if ask.stream:
            self._streams.add(ordinal)

    def _score(self, future: asyncio.Future[TokenScores], tokens: Sequence[int], top: int) -> None:
        found = score_tokens(self._llm.model, tokens, top)

        def tell() -> None:
            if not future.done():
                future.set_result(found)

        self._tell(tell)

    def _drop(self, ordinal: int) -> None:
        assert self._decoder is not None
        self._streams.discard(ordinal)
        if self._decoder.holds(ordinal):
            self._decoder.drop(ordinal)

    def _tell(self, call: Work) -> None:
        """Call something on the event loop, unless that is gone."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _end_all(self) -> None:
        for inbox in self._inboxes.values():
            inbox.put(_gone())
        for future in self._scoring:
            if not future.done():
                future.set_exception(_gone())


def _gone() -> RequestRefused:
    return RequestRefused(503, "the model does not answer any more; see the server's log")


def _finish_of(completion: Completion) -> Finish:
    return "length" if completion.truncated else "stop"


def _piece_of_stream(news: StreamedTokens) -> Piece:
    sampled: Sampled = news.sampled
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
