"""A backend that samples nothing itself: every request becomes a call, which the job's generators answer.

The event loop runs in a thread of its own; the executor takes calls out and puts answers in from its own thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from queue import Empty, SimpleQueue

from msgspec import Struct
from msgspec.structs import replace

from llamarl.messages import CallDropped, CallRequested
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.backend import Ask, BackendStats, Piece, Scores
from llamarl.serve.refusals import RequestRefused, too_long
from llamarl.serve.session_access import asking_session
from llamarl.types import Completion, Sampling, bytes_to_floats, bytes_to_tokens, tokens_to_bytes

_Answers = asyncio.Future[tuple[Completion, ...]]


class CallLimits(Struct, frozen=True, kw_only=True):
    """What a generator of the job can answer."""

    max_prompt_tokens: int
    max_new_tokens: int


class CallBackend:
    """Turns requests into calls; see the module's docstring. _Answers come whole, also where a client wants them streamed: a
    call may move to another generator, which begins it anew."""

    def __init__(self, tokenizer: Tokenizer, name: str, limits: CallLimits) -> None:
        self._tokenizer, self._name, self._limits = tokenizer, name, limits
        self._numbers = count()
        self._calls: SimpleQueue[CallRequested | CallDropped] = SimpleQueue()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, _Answers]] = {}
        self._version = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def max_positions(self) -> int:
        return self._limits.max_prompt_tokens + self._limits.max_new_tokens

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def version(self) -> int:
        """The newest version that has answered a call."""
        return self._version

    @property
    def stats(self) -> BackendStats:
        return BackendStats(waiting=len(self._waiting))

    @property
    def failure(self) -> str:
        return ""

    async def ask(self, ask: Ask) -> AsyncIterator[Piece]:
        """The job says how answers are drawn; a request only says how many and how long. So every token is sampled from the
        distribution that is trained."""
        session, ordinal, sampling = asking_session()
        if len(ask.tokens) > self._limits.max_prompt_tokens:
            told = f"{len(ask.tokens)} tokens; the job allows generator.max_prompt_tokens="
            raise too_long("prompt", f"{told}{self._limits.max_prompt_tokens}")
        session.begin_call()
        number = next(self._numbers)
        answers: _Answers = asyncio.get_running_loop().create_future()
        self._waiting[number] = (asyncio.get_running_loop(), answers)
        self._calls.put(
            CallRequested(
                number,
                ordinal,
                tokens_to_bytes(ask.tokens),
                self._drawn(ask.sampling, sampling),
                ask.stop,
                ask.stop_token_ids,
            )
        )
        try:
            completions = await answers
        except asyncio.CancelledError:
            self._calls.put(CallDropped(number))
            raise
        finally:
            self._waiting.pop(number, None)
        for index, completion in enumerate(completions):
            yield _piece(index, completion)

    async def score(self, tokens: Sequence[int], top: int) -> Scores:
        raise RequestRefused(400, "a job's endpoint measures no given tokens")

    def _drawn(self, asked: Sampling, sampling: Sampling) -> Sampling:
        longest = min(asked.max_new_tokens, sampling.max_new_tokens, self._limits.max_new_tokens)
        return replace(sampling, samples=asked.samples, max_new_tokens=longest)

    # From the executor's thread

    def take(self) -> list[CallRequested | CallDropped]:
        """What was asked, or is not wanted any more, since the last call."""
        taken: list[CallRequested | CallDropped] = []
        try:
            while True:
                taken.append(self._calls.get_nowait())
        except Empty:
            return taken

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def answer(self, number: int, completions: tuple[Completion, ...]) -> None:
        """Hand in the answers to a call. One that nobody waits for is left out."""
        newest = max((run.version for one in completions for run in one.versions), default=0)
        self._version = max(self._version, newest)
        self._settle(number, lambda answers: answers.set_result(completions))

    def refuse(self, number: int, reason: str) -> None:
        self._settle(number, lambda answers: answers.set_exception(RequestRefused(400, reason)))

    def _settle(self, number: int, act: Callable[[_Answers], None]) -> None:
        if found := self._waiting.get(number):
            loop, answers = found
            loop.call_soon_threadsafe(lambda: None if answers.done() else act(answers))


def _piece(index: int, completion: Completion) -> Piece:
    return Piece(
        index=index,
        tokens=bytes_to_tokens(completion.tokens).tolist(),
        logprobs=bytes_to_floats(completion.behavior_logprobs).tolist(),
        versions=completion.versions,
        finish="length" if completion.truncated else "stop",
        routes=completion.prompt_routes + completion.routes,
    )
