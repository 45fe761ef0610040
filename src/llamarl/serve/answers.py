"""From a request to its answers, the same for every dialect: asks the backend, turns tokens into text and calls of tools, and
tells the session of every finished answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import Struct

from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.backend import Ask, Backend, Finish, Piece
from llamarl.serve.metrics import Metrics
from llamarl.serve.session import Answered, Chat, Session
from llamarl.serve.text import TextStream, whole_text
from llamarl.serve.tool_calls import ToolCall, ToolForm, ToolText
from llamarl.serve.versions import joined_runs
from llamarl.types import VersionRun


class TextAnswer(Struct, frozen=True, kw_only=True):
    """One whole answer as a client sees it, with its tokens."""

    index: int
    text: str  # without calls of tools, the end token and the stop string
    calls: Sequence[ToolCall]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionRun, ...]
    finish: Finish
    stop: str | int | None  # the stop string or token of the request that ended it
    routes: bytes = b""  # see `Piece.routes`


class TextDelta(Struct, frozen=True, kw_only=True):
    """What is new of one answer."""

    index: int
    text: str
    calls: Sequence[ToolCall]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionRun, ...]
    answer: TextAnswer | None = None  # all of it, with its last part


class _Underway:
    """An answer that comes piece by piece."""

    def __init__(self, index: int, tokenizer: Tokenizer, stops: Sequence[str], form: ToolForm | None) -> None:
        self.index = index
        self._text, self._tools = TextStream(tokenizer, stops), ToolText(form)
        self._said: list[str] = []
        self._calls: list[ToolCall] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: tuple[VersionRun, ...] = ()

    def push(self, piece: Piece, stop_tokens: Sequence[int]) -> TextDelta:
        last = piece.finish is not None
        words, calls = self._tools.push(self._text.push(piece.tokens, last=last), last=last)
        self._said.append(words)
        self._calls.extend(calls)
        self._tokens.extend(piece.tokens)
        self._logprobs.extend(piece.logprobs)
        self._versions = joined_runs(self._versions, piece.versions)
        answer = None
        if piece.finish is not None:
            answer = TextAnswer(
                index=self.index,
                text="".join(self._said),
                calls=self._calls,
                tokens=self._tokens,
                logprobs=self._logprobs,
                versions=self._versions,
                finish=piece.finish,
                stop=self._text.stop or _stop_token(self._tokens, stop_tokens),
                routes=piece.routes,
            )
        return TextDelta(
            index=self.index,
            text=words,
            calls=calls,
            tokens=piece.tokens,
            logprobs=piece.logprobs,
            versions=piece.versions,
            answer=answer,
        )


class PromptAnswers:
    """The answers to one prompt."""

    def __init__(
        self,
        backend: Backend,
        session: Session,
        metrics: Metrics,
        ask: Ask,
        *,
        chat: Chat | None = None,
        form: ToolForm | None = None,
    ) -> None:
        """`form`: how calls of tools are found in the text; None: all of it is text."""
        self._backend, self._session, self._metrics = backend, session, metrics
        self.ask, self._chat, self._form = ask, chat, form

    @property
    def num_prompt(self) -> int:
        return len(self.ask.tokens)

    async def whole(self) -> list[TextAnswer]:
        """All answers, in order."""
        found: list[TextAnswer] = []
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                found.append(self._finished(self._whole(piece)))
        return sorted(found, key=lambda answer: answer.index)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """What is new of any answer, as it comes."""
        underway: dict[int, _Underway] = {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                one = underway.get(piece.index)
                if one is None:
                    one = _Underway(piece.index, self._backend.tokenizer, self.ask.stop, self._form)
                    underway[piece.index] = one
                delta = one.push(piece, self.ask.stop_token_ids)
                if delta.answer is not None:
                    self._finished(delta.answer)
                yield delta

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        self._metrics.prompt_tokens += self.num_prompt
        async with aclosing(self._backend.ask(self.ask)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self._metrics.sampled_tokens += len(piece.tokens)
                yield piece

    def _whole(self, piece: Piece) -> TextAnswer:
        assert piece.finish is not None, "a request that is not streamed is answered in whole pieces"
        text, stop = whole_text(self._backend.tokenizer, piece.tokens, self.ask.stop)
        words, calls = ToolText(self._form).push(text, last=True)
        return TextAnswer(
            index=piece.index,
            text=words,
            calls=calls,
            tokens=piece.tokens,
            logprobs=piece.logprobs,
            versions=piece.versions,
            finish=piece.finish,
            stop=stop or _stop_token(piece.tokens, self.ask.stop_token_ids),
            routes=piece.routes,
        )

    def _finished(self, answer: TextAnswer) -> TextAnswer:
        self._metrics.answers += 1
        self._session.record(
            Answered(
                prompt_tokens=self.ask.tokens,
                index=answer.index,
                tokens=answer.tokens,
                logprobs=answer.logprobs,
                versions=answer.versions,
                finish=answer.finish,
                routes=answer.routes,
                chat=self._chat,
                message=None if self._chat is None else message_of(answer),
            )
        )
        return answer


def message_of(answer: TextAnswer) -> dict[str, Any]:
    """The answer as a message of a chat, in the form that chat templates read."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message["tool_calls"] = [call.for_template for call in answer.calls]
    return message


def _stop_token(tokens: Sequence[int], stop_tokens: Sequence[int]) -> int | None:
    return tokens[-1] if tokens and tokens[-1] in stop_tokens else None
