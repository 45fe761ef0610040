"""Small requests: the model's name and length, tokens of a text and back, health, metrics, and rewards for a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llamarl.serve.calls import ClientCall, now_s
from llamarl.serve.fields import StrictRequest, check_length, check_tokens, decode_request
from llamarl.serve.openai_messages import ChatMessage, ChatTool, messages_for_template, tools_for_template
from llamarl.serve.refusals import bad_request
from llamarl.serve.replies import HttpReply, json_reply
from llamarl.serve.session import Chat


class TokenizeRequest(StrictRequest):
    """A text, or a chat."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ChatTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    return_token_strs: bool | None = None

    model: Any = None
    continue_final_message: Any = None
    chat_template: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset({"model"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"continue_final_message": (False,), "chat_template": ()}


class DetokenizeRequest(StrictRequest):
    tokens: list[int]
    model: Any = None

    IGNORED: ClassVar[frozenset[str]] = frozenset({"model"})


class RewardRequest(StrictRequest):
    reward: float


async def list_models(call: ClientCall) -> HttpReply:
    return json_reply({"object": "list", "data": [_model(call)]}, headers=call.version_header)


async def show_model(call: ClientCall) -> HttpReply:
    return json_reply(_model(call), headers=call.version_header)


def _model(call: ClientCall) -> dict[str, Any]:
    return {
        "id": call.backend.name,
        "object": "model",
        "created": now_s(),
        "owned_by": "llamarl",
        "max_model_len": call.backend.max_positions,
        "weight_version": call.backend.version,
    }


async def tokenize(call: ClientCall) -> HttpReply:
    request = decode_request(call.body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("prompt", "give either prompt or messages")
    if request.messages is not None:
        chat = Chat(
            messages=messages_for_template(request.messages),
            tools=tools_for_template([tool.function for tool in request.tools or ()], None),
            options=request.chat_template_kwargs or {},
            add_generation_prompt=request.add_generation_prompt,
        )
        tokens = call.prompt(chat)
    else:
        check_length(call.backend, request.prompt, "prompt")
        tokens = call.backend.tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": call.backend.max_positions, "tokens": tokens}
    if request.return_token_strs:
        found["token_strs"] = [call.names.text(token) for token in tokens]
    return json_reply(found)


async def detokenize(call: ClientCall) -> HttpReply:
    request = decode_request(call.body, DetokenizeRequest)
    check_tokens(call.backend, request.tokens, "tokens")
    return json_reply({"prompt": call.backend.tokenizer.decode(request.tokens, skip_special_tokens=False)})


async def show_metrics(call: ClientCall) -> HttpReply:
    text = call.metrics.to_text(call.backend)
    return HttpReply(body=text.encode(), content_type="text/plain; version=0.0.4; charset=utf-8")


async def take_reward(call: ClientCall) -> HttpReply:
    request = decode_request(call.body, RewardRequest)
    call.session.add_reward(request.reward)
    return json_reply({"reward": request.reward})
