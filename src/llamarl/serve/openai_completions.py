"""`POST /v1/completions`: plain prompts, as text or as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any, ClassVar

from llamarl.serve.answers import PromptAnswers, TextAnswer, TextDelta
from llamarl.serve.backend import Scores
from llamarl.serve.calls import ClientCall, new_id, now_s, openai_usage, runs_of
from llamarl.serve.errors_json import openai_error_event
from llamarl.serve.fields import SampledRequest, ask_of, check_length, check_tokens, decode_request
from llamarl.serve.openai_chat import StreamOptions, check_top_logprobs
from llamarl.serve.refusals import bad_request
from llamarl.serve.replies import EventStream, HttpReply, data_event, json_reply

_DEFAULT_TOKENS = 16  # as in OpenAI's own
_MAX_TOP = 20


class CompletionRequest(SampledRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]  # one text, its tokens, or a list of such; never mixed
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    model: Any = None
    user: Any = None
    request_id: Any = None
    priority: Any = None
    cache_salt: Any = None

    best_of: Any = None
    suffix: Any = None
    length_penalty: Any = None
    response_format: Any = None
    use_beam_search: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    prompt_logprobs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset({"model", "user", "request_id", "priority", "cache_salt"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SampledRequest.NEUTRAL,
        "best_of": (1,),
        "suffix": ("",),
        "length_penalty": (1,),
        "response_format": ({"type": "text"},),
        "use_beam_search": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "prompt_logprobs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
    }


async def answer_completion(call: ClientCall) -> HttpReply | EventStream:
    request = decode_request(call.body, CompletionRequest)
    prompts = [_tokens_of(call, prompt, request) for prompt in _prompts(request)]
    if len(prompts) * max(1, request.n or 1) > call.limits.max_answers:
        raise bad_request("prompt", f"at most {call.limits.max_answers} answers in one request")
    if request.stream and (len(prompts) > 1 or request.echo):
        raise bad_request("stream", "takes one prompt, and no echo")
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens", "must be at least 1, unless echo is set")
    writers = [_CompletionWriter(call, request, tokens) for tokens in prompts]
    if request.stream:
        return writers[0].stream()
    return _joined(call, request, writers, await _all_of(writers))


async def _all_of(writers: Sequence[_CompletionWriter]) -> list[tuple[list[TextAnswer], list[dict[str, Any]]]]:
    """The answers to all prompts, or the first refusal, which ends the others."""
    try:
        async with asyncio.TaskGroup() as together:
            tasks = [together.create_task(writer.whole()) for writer in writers]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    numbers = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if not prompt or len(prompt) not in (len(numbers), len(texts), len(lists)):
        raise bad_request("prompt", "expected a text, its tokens, or a list of texts or of lists of tokens")
    return [numbers] if numbers else [*texts, *lists]


def _tokens_of(call: ClientCall, prompt: str | list[int], request: CompletionRequest) -> list[int]:
    if isinstance(prompt, str):
        check_length(call.backend, prompt, "prompt")
        prompt = call.backend.tokenizer.encode(prompt, add_special_tokens=bool(request.add_special_tokens))
    check_tokens(call.backend, prompt, "prompt")
    return prompt


class _CompletionWriter:
    """Writes the answers to one plain prompt."""

    def __init__(self, call: ClientCall, request: CompletionRequest, tokens: list[int]) -> None:
        self._call, self._request, self.tokens = call, request, tokens
        self._id, self._created = new_id("cmpl-"), now_s()
        ask = ask_of(
            request,
            call.backend,
            call.limits,
            tokens,
            stream=request.stream,
            max_tokens=_new_tokens(request.max_tokens),
        )
        if request.echo and request.logprobs is not None and not 0 <= request.logprobs <= _MAX_TOP:
            raise bad_request("logprobs", f"must be from 0 to {_MAX_TOP}, is {request.logprobs}")
        if request.max_tokens != 0:
            check_top_logprobs("logprobs", request.logprobs, ask.sampling.temperature)
        self._answers: PromptAnswers = call.answers(ask)

    async def whole(self) -> tuple[list[TextAnswer], list[dict[str, Any]]]:
        """The answers, and what the client sees of them, without the numbers of the choices."""
        request, scores = self._request, None
        if request.echo and request.logprobs is not None:
            scores = await self._call.backend.score(self.tokens, request.logprobs)
        answers = [] if request.max_tokens == 0 else await self._answers.whole()
        choices = [self._choice(answer, scores) for answer in answers]
        return answers, choices or [self._prompt_alone(scores)] * max(1, request.n or 1)

    def _choice(self, answer: TextAnswer, scores: Scores | None) -> dict[str, Any]:
        text = self._prompt_text() + answer.text if self._request.echo else answer.text
        choice: dict[str, Any] = {
            "text": text,
            "logprobs": self._logprobs(answer.tokens, answer.logprobs, scores),
            "finish_reason": answer.finish,
            "stop_reason": answer.stop,
            "weight_versions": runs_of(answer.versions),
        }
        if self._request.return_token_ids:
            choice |= {"token_ids": answer.tokens, "prompt_token_ids": self.tokens}
        return choice

    def _prompt_alone(self, scores: Scores | None) -> dict[str, Any]:
        """An answer without new tokens: only the prompt, with its log-probs."""
        return {
            "text": self._prompt_text(),
            "logprobs": self._logprobs([], [], scores),
            "finish_reason": "length",
            "stop_reason": None,
            "weight_versions": [],
        }

    def _prompt_text(self) -> str:
        return self._call.backend.tokenizer.decode(self.tokens)

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], scores: Scores | None = None
    ) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        names = [self._name(token) for token in tokens]
        own = (
            [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)] if self._request.logprobs else None
        )
        if scores is None:
            return _legacy(names, list(logprobs), own)
        before = [self._name(token) for token in self.tokens]
        tops: list[dict[str, float] | None] = [None]
        for name, logprob, top in zip(before[1:], scores.logprobs, scores.top, strict=True):
            tops.append({**{self._name(token): value for token, value in top}, name: logprob})
        all_tops = [*tops, *own] if own is not None else None
        return _legacy([*before, *names], [None, *scores.logprobs, *logprobs], all_tops)

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._request.return_tokens_as_token_ids else self._call.names.text(token)

    def stream(self) -> EventStream:
        return EventStream(
            events=self._events(), headers=self._call.version_header, describe_failure=openai_error_event
        )

    async def _events(self) -> AsyncGenerator[bytes, None]:
        num_sampled, first = 0, True
        async with aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                num_sampled += len(delta.tokens)
                yield data_event(self._chunk([self._delta(delta, with_prompt=first)]))
                first = False
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            yield data_event({**self._chunk([]), "usage": openai_usage(len(self.tokens), num_sampled)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = self._call.backend.name
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": name,
            "choices": choices,
        }

    def _delta(self, delta: TextDelta, *, with_prompt: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens, delta.logprobs),
            "finish_reason": None if delta.answer is None else delta.answer.finish,
            "weight_versions": runs_of(delta.versions),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = delta.tokens
            if with_prompt:
                choice["prompt_token_ids"] = self.tokens
        return choice


def _legacy(
    names: list[str], logprobs: Sequence[float | None], tops: Sequence[dict[str, float] | None] | None
) -> dict[str, Any]:
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": list(accumulate((len(name) for name in names), initial=0))[:-1] if names else [],
    }


def _joined(
    call: ClientCall,
    request: CompletionRequest,
    writers: Sequence[_CompletionWriter],
    found: Sequence[tuple[list[TextAnswer], list[dict[str, Any]]]],
) -> HttpReply:
    answers = [answer for some, _ in found for answer in some]
    choices = [choice for _, some in found for choice in some]
    body = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": now_s(),
        "model": call.backend.name,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": openai_usage(
            sum(len(writer.tokens) for writer in writers), sum(len(answer.tokens) for answer in answers)
        ),
    }
    return json_reply(body, headers=call.version_header_of(answers))


def _new_tokens(max_tokens: int | None) -> int:
    """Length of an answer; a request for the prompt alone is checked as if it wanted one token."""
    return _DEFAULT_TOKENS if max_tokens is None else 1 if max_tokens == 0 else max_tokens
