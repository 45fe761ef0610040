"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from msgspec import Struct

from llamarl.serve.answers import PromptAnswers, TextAnswer, TextDelta
from llamarl.serve.backend import Ask
from llamarl.serve.calls import ClientCall, new_id, runs_of
from llamarl.serve.errors_json import anthropic_error_event
from llamarl.serve.fields import StrictRequest, decode_request, sampling_of, stops_of
from llamarl.serve.openai_messages import FunctionTool, tools_for_template
from llamarl.serve.refusals import bad_request
from llamarl.serve.replies import EventStream, HttpReply, json_reply, named_event
from llamarl.serve.session import Chat, Message


class TextBlock(Struct, tag="text"):
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str = ""


class RedactedThinkingBlock(Struct, tag="redacted_thinking"):
    data: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class BlockMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class InputTool(Struct):
    """A tool of the client. Tools that Anthropic runs itself have another type."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(Struct):
    type: str
    disable_parallel_tool_use: bool = False


class OutputConfig(Struct, forbid_unknown_fields=True):
    """How hard a model is to think, which is ignored; answers of a given form are refused."""

    effort: Any = None
    format: None = None


class CountRequest(StrictRequest):
    """What decides the tokens of a prompt."""

    messages: list[BlockMessage]
    system: str | list[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None

    model: Any = None
    thinking: Any = None
    cache_control: Any = None
    output_config: OutputConfig | None = None
    mcp_servers: Any = None
    output_format: Any = None
    context_management: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset({"model", "thinking", "cache_control", "output_config"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "output_format": (),
        "context_management": (),
    }


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    container: Any = None

    IGNORED: ClassVar[frozenset[str]] = CountRequest.IGNORED | {"metadata", "service_tier", "inference_geo"}
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {**CountRequest.NEUTRAL, "container": ()}


def chat_of(request: CountRequest) -> Chat:
    """The chat of a request, in the form that chat templates read."""
    messages: list[Message] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for place, message in enumerate(request.messages):
        messages.extend(_messages(message, f"messages[{place}]"))
    if not request.messages:
        raise bad_request("messages", "is empty")
    return Chat(messages=tuple(messages), tools=_tools(request))


def _tools(request: CountRequest) -> tuple[dict[str, Any], ...]:
    for place, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise bad_request(f"tools[{place}]", "is not a tool of the client; only those of type custom are supported")
    choice = request.tool_choice
    if choice is not None and choice.disable_parallel_tool_use:
        raise bad_request("tool_choice.disable_parallel_tool_use", "is not supported")
    found = [FunctionTool(tool.name, tool.description, tool.input_schema) for tool in request.tools or ()]
    return tools_for_template(found, None if choice is None else choice.type)


def _text(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _messages(message: BlockMessage, field: str) -> list[Message]:
    """One message as templates have it: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    if (results and message.role != "user") or (calls and message.role != "assistant"):
        raise bad_request(field, "tools are used by the assistant, and their results come from the user")
    text = "".join(block.text for block in message.content if isinstance(block, TextBlock))
    thought = "".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock))
    rest: dict[str, Any] = {"role": message.role, "content": text}
    if calls:
        rest["tool_calls"] = calls
    if thought:
        rest["reasoning_content"] = thought
    return results if results and not text else [*results, rest]


async def count_tokens(call: ClientCall) -> HttpReply:
    request = decode_request(call.body, CountRequest)
    return json_reply({"input_tokens": len(call.prompt(chat_of(request)))})


async def answer_messages(call: ClientCall) -> HttpReply | EventStream:
    request = decode_request(call.body, MessagesRequest)
    chat = chat_of(request)
    tokens = call.prompt(chat)
    sampling = sampling_of(
        call.backend,
        call.limits,
        len(tokens),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )
    stop = stops_of(request.stop_sequences, "stop_sequences")
    ask = Ask(tokens=tokens, sampling=sampling, stop=stop, stream=bool(request.stream))
    writer = _MessageWriter(call, call.answers(ask, chat))
    if not request.stream:
        return await writer.whole()
    return EventStream(events=writer.events(), headers=call.version_header, describe_failure=anthropic_error_event)


class _MessageWriter:
    """Writes one message, whole or as the events of its blocks."""

    def __init__(self, call: ClientCall, answers: PromptAnswers) -> None:
        self._call, self._answers, self._id = call, answers, new_id("msg_")
        self._block, self._in_text = -1, False  # number of the block being written; whether it is text

    def _message(self, content: list[dict[str, Any]], num_sampled: int, **ended: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._call.backend.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **ended,
            "usage": {
                "input_tokens": self._answers.num_prompt,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": num_sampled,
            },
        }

    async def whole(self) -> HttpReply:
        (answer,) = await self._answers.whole()
        content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in answer.calls
        ]
        ended = {**_stop(answer), "weight_versions": runs_of(answer.versions)}
        body = self._message(content, len(answer.tokens), **ended)
        return json_reply(body, headers=self._call.version_header_of([answer]))

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                events = [] if begun else [_event("message_start", message=self._message([], 0))]
                begun = True
                events += self._events_of(delta)
                yield b"".join(events)

    def _events_of(self, delta: TextDelta) -> list[bytes]:
        events: list[bytes] = []
        if delta.text:
            if not self._in_text:
                events += self._open({"type": "text", "text": ""})
                self._in_text = True
            events.append(self._part({"type": "text_delta", "text": delta.text}))
        for call in delta.calls:
            events += self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self._in_text = False
            events.append(self._part({"type": "input_json_delta", "partial_json": call.arguments_json}))
        if (answer := delta.answer) is not None:
            events += self._close()
            ended = {"delta": _stop(answer), "weight_versions": runs_of(answer.versions)}
            events.append(_event("message_delta", **ended, usage={"output_tokens": len(answer.tokens)}))
            events.append(_event("message_stop"))
        return events

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        events = self._close()
        self._block += 1
        return [*events, _event("content_block_start", index=self._block, content_block=block)]

    def _close(self) -> list[bytes]:
        return [_event("content_block_stop", index=self._block)] if self._block >= 0 else []

    def _part(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _stop(answer: TextAnswer) -> dict[str, Any]:
    if answer.finish == "length":
        reason = "max_tokens"
    elif answer.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if answer.stop is not None else "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}
