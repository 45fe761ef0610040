"""`POST /inference/v1/generate`: tokens in, tokens out, as vLLM has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec

from llamarl.serve.answers import PromptAnswers
from llamarl.serve.backend import Scores
from llamarl.serve.calls import ClientCall, new_id, openai_usage, runs_of
from llamarl.serve.errors_json import openai_error_event
from llamarl.serve.fields import SampledRequest, StrictRequest, ask_of, check_neutral, check_tokens, decode_request
from llamarl.serve.openai_chat import StreamOptions
from llamarl.serve.refusals import bad_request
from llamarl.serve.replies import EventStream, HttpReply, data_event, json_reply

IGNORED_HEADER = "x-ignored-fields"  # keys of sampling_params that are unknown here
_MAX_TOP = 20


class SamplingParams(SampledRequest):
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    detokenize: Any = None
    output_kind: Any = None
    extra_args: Any = None

    allowed_token_ids: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind", "extra_args"}
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {**SampledRequest.NEUTRAL, "allowed_token_ids": ()}


class GenerateRequest(StrictRequest):
    token_ids: list[int]
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None

    model: Any = None
    priority: Any = None
    cache_salt: Any = None
    features: Any = None
    kv_transfer_params: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset({"model", "priority", "cache_salt"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"features": (), "kv_transfer_params": ()}


async def answer_generate(call: ClientCall) -> HttpReply | EventStream:
    request = decode_request(call.body, GenerateRequest)
    known = {
        name: request.sampling_params[name]
        for name in SamplingParams.__struct_fields__
        if name in request.sampling_params
    }
    params = _params(known)
    unknown = sorted(request.sampling_params.keys() - known.keys())
    check_tokens(call.backend, request.token_ids, "token_ids")
    ask = ask_of(
        params,
        call.backend,
        call.limits,
        request.token_ids,
        stream=request.stream,
        max_tokens=params.max_tokens,
        max_field="sampling_params.max_tokens",
        stop_field="sampling_params.stop",
    )
    _check_top("sampling_params.logprobs", params.logprobs, 1)
    _check_top("sampling_params.prompt_logprobs", params.prompt_logprobs, _MAX_TOP)
    headers = {IGNORED_HEADER: _printable(unknown)} if unknown else {}
    writer = _TokenWriter(call, request, params, call.answers(ask), headers)
    if request.stream and params.prompt_logprobs is not None:
        raise bad_request("sampling_params.prompt_logprobs", "cannot be streamed")
    return writer.stream() if request.stream else await writer.whole()


def _params(known: dict[str, Any]) -> SamplingParams:
    try:
        params = msgspec.convert(known, SamplingParams)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise bad_request(f"sampling_params.{place.rstrip('`')}", reason.replace("`", "'").lower()) from None
    check_neutral(params)
    return params


def _check_top(field: str, value: int | None, most: int) -> None:
    if value is not None and not 0 <= value <= most:
        raise bad_request(field, f"must be from 0 to {most}, is {value}")


def _printable(names: Sequence[str]) -> str:
    return ", ".join(
        "".join(char if char.isascii() and char.isprintable() else "?" for char in name[:60]) for name in names[:20]
    )


class _TokenWriter:
    def __init__(
        self,
        call: ClientCall,
        request: GenerateRequest,
        params: SamplingParams,
        answers: PromptAnswers,
        headers: dict[str, str],
    ) -> None:
        self._call, self._params, self._answers, self._headers = call, params, answers, headers
        self._id = request.request_id or new_id("gen-")
        self._with_usage = request.stream_options is not None and request.stream_options.include_usage

    async def whole(self) -> HttpReply:
        scores = None
        if self._params.prompt_logprobs is not None:
            scores = await self._call.backend.score(self._answers.ask.tokens, self._params.prompt_logprobs)
        answers = await self._answers.whole()
        body: dict[str, Any] = {
            "request_id": self._id,
            "model": self._call.backend.name,
            "choices": [
                {
                    "index": answer.index,
                    "token_ids": answer.tokens,
                    "logprobs": self._logprobs(answer.tokens, answer.logprobs),
                    "finish_reason": answer.finish,
                    "stop_reason": answer.stop,
                    "weight_versions": runs_of(answer.versions),
                }
                for answer in answers
            ],
            "prompt_logprobs": None if scores is None else self._prompt_logprobs(scores),
            "usage": openai_usage(self._answers.num_prompt, sum(len(answer.tokens) for answer in answers)),
        }
        return json_reply(body, headers={**self._headers, **self._call.version_header_of(answers)})

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        return None if self._params.logprobs is None else {"content": self._call.names.id_logprobs(tokens, logprobs)}

    def _prompt_logprobs(self, scores: Scores) -> list[dict[str, Any] | None]:
        """At each place the likeliest tokens and the one that stands there, by id; nothing at the first."""
        found: list[dict[str, Any] | None] = [None]
        tokens = self._answers.ask.tokens[1:]
        for token, logprob, rank, top in zip(tokens, scores.logprobs, scores.ranks, scores.top, strict=True):
            here = {str(one): self._scored(one, value, place) for place, (one, value) in enumerate(top, start=1)}
            found.append({**here, str(token): self._scored(token, logprob, rank)})
        return found

    def _scored(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._call.names.text(token)}

    def stream(self) -> EventStream:
        return EventStream(
            events=self._events(),
            headers={**self._headers, **self._call.version_header},
            describe_failure=openai_error_event,
        )

    async def _events(self) -> AsyncGenerator[bytes, None]:
        num_sampled = 0
        async with aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                num_sampled += len(delta.tokens)
                choice = {
                    "index": delta.index,
                    "token_ids": delta.tokens,
                    "logprobs": self._logprobs(delta.tokens, delta.logprobs),
                    "finish_reason": None if delta.answer is None else delta.answer.finish,
                    "weight_versions": runs_of(delta.versions),
                }
                yield data_event({"request_id": self._id, "choices": [choice]})
        if self._with_usage:
            usage = openai_usage(self._answers.num_prompt, num_sampled)
            yield data_event({"request_id": self._id, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"
