"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from msgspec import Struct

from llamarl.serve.answers import PromptAnswers, TextAnswer, TextDelta
from llamarl.serve.calls import ClientCall, new_id, now_s, openai_usage, runs_of
from llamarl.serve.errors_json import openai_error_event
from llamarl.serve.fields import SampledRequest, ask_of, decode_request
from llamarl.serve.openai_messages import ChatMessage, ChatTool, messages_for_template, tools_for_template
from llamarl.serve.refusals import bad_request
from llamarl.serve.replies import EventStream, HttpReply, data_event, json_reply
from llamarl.serve.session import Chat
from llamarl.serve.tool_calls import ToolCall


class StreamOptions(Struct):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(SampledRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    model: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    request_id: Any = None
    priority: Any = None
    cache_salt: Any = None
    reasoning_effort: Any = None

    parallel_tool_calls: Any = None
    length_penalty: Any = None
    response_format: Any = None
    modalities: Any = None
    verbosity: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    echo: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    prompt_logprobs: Any = None
    required_prefix_token_ids: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "model",
            "user",
            "metadata",
            "store",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "request_id",
            "priority",
            "cache_salt",
            "reasoning_effort",
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SampledRequest.NEUTRAL,
        "parallel_tool_calls": (True,),
        "length_penalty": (1,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "verbosity": (),
        "best_of": (1,),
        "use_beam_search": (False,),
        "echo": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "prompt_logprobs": (),
        "required_prefix_token_ids": (),
        "functions": (),
        "function_call": (),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "chat_template": (),
        "documents": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
    }


async def answer_chat(call: ClientCall) -> HttpReply | EventStream:
    request = decode_request(call.body, ChatRequest)
    chat = Chat(
        messages=messages_for_template(request.messages),
        tools=tools_for_template([tool.function for tool in request.tools or ()], request.tool_choice),
        options=request.chat_template_kwargs or {},
    )
    tokens = call.prompt(chat)
    newer = request.max_completion_tokens is not None
    ask = ask_of(
        request,
        call.backend,
        call.limits,
        tokens,
        stream=request.stream,
        max_tokens=request.max_completion_tokens if newer else request.max_tokens,
        max_field="max_completion_tokens" if newer else "max_tokens",
    )
    check_top_logprobs("top_logprobs", request.top_logprobs, ask.sampling.temperature)
    writer = _ChatWriter(call, request, call.answers(ask, chat))
    return writer.stream() if request.stream else await writer.whole()


def check_top_logprobs(field: str, top: int | None, temperature: float) -> None:
    """Only what is known exactly: the sampled token, which is the likeliest one where the answer is greedy."""
    if top is not None and not 0 <= top <= (1 if temperature == 0 else 0):
        raise bad_request(field, "only log-probs of sampled tokens are known; use 0, or 1 at temperature 0")


class _ChatWriter:
    """Writes the answers to one chat, whole or as a stream of chunks."""

    def __init__(self, call: ClientCall, request: ChatRequest, answers: PromptAnswers) -> None:
        self._call, self._request, self._answers = call, request, answers
        self._id, self._created = new_id("chatcmpl-"), now_s()

    async def whole(self) -> HttpReply:
        answers = await self._answers.whole()
        found = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._call.backend.name,
            "choices": [self._choice(answer) for answer in answers],
            "usage": openai_usage(self._answers.num_prompt, sum(len(answer.tokens) for answer in answers)),
        }
        if self._request.return_token_ids:
            found["prompt_token_ids"] = self._answers.ask.tokens
        return json_reply(found, headers=self._call.version_header_of(answers))

    def _choice(self, answer: TextAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [_call_json(call) for call in answer.calls]
        choice = {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens, answer.logprobs),
            "finish_reason": finish_reason(answer),
            "stop_reason": answer.stop,
            "weight_versions": runs_of(answer.versions),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        as_ids, with_top = bool(self._request.return_tokens_as_token_ids), bool(self._request.top_logprobs)
        return {"content": self._call.names.chat_logprobs(tokens, logprobs, as_ids=as_ids, with_top=with_top)}

    def stream(self) -> EventStream:
        return EventStream(
            events=self._events(), headers=self._call.version_header, describe_failure=openai_error_event
        )

    async def _events(self) -> AsyncGenerator[bytes, None]:
        begun: dict[int, int] = {}  # calls of tools so far, of each answer that began
        num_sampled = 0
        async with aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                num_sampled += len(delta.tokens)
                first = delta.index not in begun
                yield data_event(self._chunk([self._delta(delta, begun)], with_prompt=first))
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            usage = openai_usage(self._answers.num_prompt, num_sampled)
            yield data_event({**self._chunk([], with_prompt=False), "usage": usage})
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], *, with_prompt: bool) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._call.backend.name,
            "choices": choices,
        }
        if with_prompt and self._request.return_token_ids:
            chunk["prompt_token_ids"] = self._answers.ask.tokens
        return chunk

    def _delta(self, delta: TextDelta, begun: dict[int, int]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if delta.index not in begun:
            begun[delta.index], message = 0, {"role": "assistant", "content": ""}
        if delta.text:
            message["content"] = delta.text
        if delta.calls:
            first = begun[delta.index]
            begun[delta.index] += len(delta.calls)
            message["tool_calls"] = [
                {"index": place, **_call_json(call)} for place, call in enumerate(delta.calls, start=first)
            ]
        choice = {
            "index": delta.index,
            "delta": message,
            "logprobs": self._logprobs(delta.tokens, delta.logprobs),
            "finish_reason": None if delta.answer is None else finish_reason(delta.answer),
            "weight_versions": runs_of(delta.versions),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def finish_reason(answer: TextAnswer) -> str:
    return "tool_calls" if answer.calls and answer.finish == "stop" else answer.finish
