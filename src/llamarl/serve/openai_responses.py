"""`POST /v1/responses`: OpenAI's Responses dialect. Nothing is kept between requests: a client sends the whole dialogue."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from msgspec import Struct

from llamarl.serve.answers import PromptAnswers, TextAnswer
from llamarl.serve.backend import Ask
from llamarl.serve.calls import ClientCall, new_id, now_s, runs_of
from llamarl.serve.errors_json import responses_error_event
from llamarl.serve.fields import StrictRequest, decode_request, sampling_of
from llamarl.serve.openai_messages import FunctionTool, TextPart, call_for_template, text_of, tools_for_template
from llamarl.serve.refusals import bad_request
from llamarl.serve.replies import EventStream, HttpReply, json_reply, named_event
from llamarl.serve.session import Chat, Message
from llamarl.serve.tool_calls import ToolCall


class InputItem(Struct):
    """A message, a call of a tool, or its output; `type` says which."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[TextPart] | None = None


class ResponseTool(Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(StrictRequest):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there never is any

    model: Any = None
    user: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    stream_options: Any = None
    client_metadata: Any = None

    parallel_tool_calls: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    text: Any = None
    truncation: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None
    prompt: Any = None
    context_management: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "model",
            "user",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "reasoning",
            "stream_options",
            "client_metadata",
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "parallel_tool_calls": (True,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "text": ({}, {"format": {"type": "text"}}),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "max_tool_calls": (),
        "prompt": (),
        "context_management": (),
    }


def chat_of_items(request: ResponsesRequest) -> Chat:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        for place, item in enumerate(request.input):
            _add_item(messages, item, f"input[{place}]")
    if not request.input:
        raise bad_request("input", "is empty")
    return Chat(messages=tuple[Message, ...](messages), tools=_tools(request))


def _add_item(messages: list[dict[str, Any]], item: InputItem, field: str) -> None:
    if item.type == "message":
        if item.role is None:
            raise bad_request(f"{field}.role", "is missing")
        role = "system" if item.role == "developer" else item.role
        messages.append({"role": role, "content": text_of(item.content, f"{field}.content")})
    elif item.type == "function_call":
        call = call_for_template(item.call_id, item.name, item.arguments)
        if messages and messages[-1]["role"] == "assistant":  # one turn of the model: what it said, and its calls
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif item.type == "function_call_output":
        output = text_of(item.output, f"{field}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    elif item.type != "reasoning":  # what a model thought is part of its text here, and is never sent back
        raise bad_request(f"{field}.type", f"'{item.type[:40]}' is not supported")


def _tools(request: ResponsesRequest) -> tuple[dict[str, Any], ...]:
    for place, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            raise bad_request(f"tools[{place}]", f"type '{tool.type[:40]}' is not supported; only functions are")
    found = [FunctionTool(tool.name, tool.description, tool.parameters) for tool in request.tools or ()]
    return tools_for_template(found, request.tool_choice)


async def answer_responses(call: ClientCall) -> HttpReply | EventStream:
    request = decode_request(call.body, ResponsesRequest)
    chat = chat_of_items(request)
    tokens = call.prompt(chat)
    sampling = sampling_of(
        call.backend,
        call.limits,
        len(tokens),
        max_tokens=request.max_output_tokens,
        max_field="max_output_tokens",
        temperature=request.temperature,
        top_p=request.top_p,
    )
    ask = Ask(tokens=tokens, sampling=sampling, stream=bool(request.stream))
    writer = _ResponseWriter(call, request, call.answers(ask, chat))
    if not request.stream:
        return await writer.whole()
    return EventStream(events=writer.events(), headers=call.version_header, describe_failure=responses_error_event)


class _ResponseWriter:
    """Writes one response, whole or as the events of its items."""

    def __init__(self, call: ClientCall, request: ResponsesRequest, answers: PromptAnswers) -> None:
        self._call, self._request, self._answers = call, request, answers
        self._id, self._created, self._sequence = new_id("resp_"), now_s(), -1
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._message_id, self._said = "", ""  # the message being written

    def _response(self, status: str, output: Sequence[dict[str, Any]], answer: TextAnswer | None) -> dict[str, Any]:
        request, num_prompt = self._request, self._answers.num_prompt
        found: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._call.backend.name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self._answers.ask.sampling.temperature,
            "top_p": self._answers.ask.sampling.top_p,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "usage": None,
        }
        if answer is not None:
            num_sampled = len(answer.tokens)
            found["weight_versions"] = runs_of(answer.versions)
            found["usage"] = {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_sampled,
            }
        return found

    async def whole(self) -> HttpReply:
        (answer,) = await self._answers.whole()
        status = _status(answer)
        output = [_message_item(new_id("msg_"), answer.text, status)] if answer.text or not answer.calls else []
        output += [_call_item(new_id("fc_"), call, call.arguments_json, "completed") for call in answer.calls]
        return json_reply(self._response(status, output, answer), headers=self._call.version_header_of([answer]))

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                events: list[bytes] = []
                if not begun:
                    begun, started = True, self._response("in_progress", [], None)
                    events += [self._event("response.created", response=started)]
                    events += [self._event("response.in_progress", response=started)]
                if delta.text:
                    events += self._words(delta.text)
                for call in delta.calls:
                    events += [*self._end_message("completed"), *self._called(call)]
                if (answer := delta.answer) is not None:
                    events += self._ended(answer)
                yield b"".join(events)

    def _words(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        if not self._message_id:
            self._message_id, self._said = new_id("msg_"), ""
            item = {**_message_item(self._message_id, "", "in_progress"), "content": []}
            events.append(self._event("response.output_item.added", output_index=len(self._output), item=item))
            events.append(self._event("response.content_part.added", **self._place, part=_text_part("")))
        self._said += text
        events.append(self._event("response.output_text.delta", **self._place, delta=text, logprobs=[]))
        return events

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self._output), "content_index": 0}

    def _end_message(self, status: str) -> list[bytes]:
        if not self._message_id:
            return []
        item, place = _message_item(self._message_id, self._said, status), self._place
        events = [
            self._event("response.output_text.done", **place, text=self._said, logprobs=[]),
            self._event("response.content_part.done", **place, part=_text_part(self._said)),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._message_id = ""
        return events

    def _called(self, call: ToolCall) -> list[bytes]:
        item_id, index, arguments = new_id("fc_"), len(self._output), call.arguments_json
        item = _call_item(item_id, call, arguments, "completed")
        place = {"item_id": item_id, "output_index": index}
        begun = _call_item(item_id, call, "", "in_progress")
        self._output.append(item)
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _ended(self, answer: TextAnswer) -> list[bytes]:
        status = _status(answer)
        events = [] if self._message_id or self._output else self._words("")
        events += self._end_message(status)
        done = self._response(status, self._output, answer)
        return [*events, self._event(f"response.{status}", response=done)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return named_event(kind, {"type": kind, "sequence_number": self._sequence, **fields})


def _status(answer: TextAnswer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": [_text_part(text)]}


def _call_item(item_id: str, call: ToolCall, arguments: str, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
        "status": status,
    }
