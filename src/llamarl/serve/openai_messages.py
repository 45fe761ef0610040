"""Messages and tools as OpenAI's chat dialect writes them, turned into the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from msgspec import Struct

from llamarl.serve.fields import StrictRequest
from llamarl.serve.refusals import bad_request
from llamarl.serve.session import Message


class TextPart(Struct):
    """A part of a message. Only text is understood."""

    type: str
    text: str = ""


class CalledFunction(Struct):
    name: str
    arguments: str = "{}"


class CalledTool(Struct):
    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class ChatMessage(StrictRequest):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Any = None
    parsed: Any = None
    audio: None = None
    function_call: None = None

    IGNORED: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations", "parsed", "audio", "function_call"})


class FunctionTool(Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Struct):
    function: FunctionTool
    type: Literal["function"] = "function"


def text_of(content: str | Sequence[TextPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text"):
            raise bad_request(field, f"a part of type '{part.type[:40]}' is not supported; only text is")
    return "".join(part.text for part in content)


def message_for_template(message: ChatMessage, field: str) -> Message:
    # Templates know no developer; its words are the system's.
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content, f"{field}.content"),
    }
    if message.name is not None:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = [
            call_for_template(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    return found


def call_for_template(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool as templates read it. Arguments are an object; what is not JSON stays text."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def messages_for_template(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    if not messages:
        raise bad_request("messages", "is empty")
    return tuple(message_for_template(message, f"messages[{place}]") for place, message in enumerate(messages))


def tool_for_template(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def tools_for_template(
    tools: Sequence[FunctionTool] | None, choice: Any, field: str = "tool_choice"
) -> tuple[dict[str, Any], ...]:
    """The tools to show to the model: none where the request says that it must not call one."""
    if choice not in (None, "auto", "none"):
        raise bad_request(field, "only 'auto' and 'none' are supported: the model decides itself")
    return () if choice == "none" else tuple(tool_for_template(tool) for tool in tools or ())
