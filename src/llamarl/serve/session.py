"""Who is asking: a session turns chats into tokens and is told what was answered. In plain serving it keeps nothing."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from llamarl.errors import ConfigError, InputError, ModelError
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.backend import Finish
from llamarl.serve.refusals import RequestRefused, bad_request
from llamarl.types import VersionRun

Message = Mapping[str, Any]
"""One message in the form that chat templates read: `role`, `content` (text), and where there are any `tool_calls`
(`{"id", "type": "function", "function": {"name", "arguments": object}}`), `tool_call_id`, `name`, `reasoning_content`."""


class Chat(Struct, frozen=True, kw_only=True):
    """A chat to be answered. Every dialect is turned into this one form."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    options: Mapping[str, Any] = {}  # values for the model's chat template
    add_generation_prompt: bool = True


class Answered(Struct, frozen=True, kw_only=True):
    """One finished answer, exactly as it was sampled."""

    prompt_tokens: Sequence[int]
    index: int  # which of the answers to the prompt
    tokens: Sequence[int]  # the end token included
    logprobs: Sequence[float]
    versions: tuple[VersionRun, ...]
    finish: Finish
    routes: bytes = b""  # see `Piece.routes`
    chat: Chat | None = None  # None: the prompt was text or tokens
    message: Message | None = (
        None  # the answer as the client sees it, in the form of `Chat.messages`; None without a chat
    )


class Session(Protocol):
    """One client's dialogue. Methods raise RequestRefused."""

    def prompt(self, chat: Chat) -> list[int]:
        """Tokens of a chat, ready for the model's answer. Also called where no answer follows, to count tokens."""
        ...

    def record(self, answered: Answered) -> None:
        """Called once for each finished answer, before the client can have seen its end."""
        ...

    def add_reward(self, value: float) -> None:
        """A reward that the client gave itself by `POST /rl/reward`."""
        ...


class Access(Protocol):
    """Decides who may ask."""

    def session(self, key: str | None, headers: Mapping[str, str]) -> Session:
        """The session of a key. `headers` have lower-case names. Raises RequestRefused with 401 for an unknown key."""
        ...


def template_tokens(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Tokens of a chat by the model's own template. Raises RequestRefused, which says nothing of this machine's folders."""
    if not tokenizer.has_chat:
        raise bad_request("messages", "the model has no chat template; send plain prompts to /v1/completions")
    try:
        return tokenizer.chat(
            chat.messages,
            tools=chat.tools,
            options=chat.options,
            add_generation_prompt=chat.add_generation_prompt,
        )
    except ConfigError as error:
        raise bad_request("chat_template_kwargs", f"the chat template has {str(error).partition(' has ')[2]}") from None
    except ModelError as error:
        raise bad_request("messages", f"chat template: {str(error).partition('chat template: ')[2]}") from None


class StatelessSession:
    """The session of plain serving: every request stands alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, chat: Chat) -> list[int]:
        return template_tokens(self._tokenizer, chat)

    def record(self, answered: Answered) -> None:
        pass

    def add_reward(self, value: float) -> None:
        raise RequestRefused(404, "/rl/reward: this server trains nothing")


class KeyAccess:
    """Lets in who knows one of the keys; without keys, everybody."""

    def __init__(self, tokenizer: Tokenizer, keys: Sequence[str] = ()) -> None:
        if not all(keys):
            raise InputError("--key: is empty")
        self._session, self._keys = StatelessSession(tokenizer), [key.encode() for key in keys]

    def session(self, key: str | None, headers: Mapping[str, str]) -> Session:
        if not self._keys:
            _check_local(headers)
        given = (key or "").encode()
        # All are compared, so that the time tells nothing about them.
        if self._keys and not any([hmac.compare_digest(given, known) for known in self._keys]):
            raise RequestRefused(401, "the key is missing or wrong")
        return self._session


def _check_local(headers: Mapping[str, str]) -> None:
    """Without keys, every program on this machine may ask, but no web page that a browser shows here: neither by a name of
    its own for this machine, nor from another origin."""
    hosts = [headers.get("host", "localhost"), headers.get("origin", "http://localhost").partition("://")[2]]
    for host in hosts:
        if re.sub(r":\d+$", "", host) not in ("127.0.0.1", "localhost", "[::1]"):
            raise RequestRefused(403, "only for programs on this machine; a server with --key answers others")
