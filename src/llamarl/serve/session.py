"""Who is asking: a session turns chats into tokens and is told what was answered. In plain serving it keeps nothing."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from llamarl.errors import InputError
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.backend import Finish
from llamarl.serve.refusals import RequestRefused
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
    chat: Chat | None = None  # None: the prompt was text or tokens
    message: Message | None = (
        None  # the answer as the client sees it, in the form of `Chat.messages`; None without a chat
    )


class Session(Protocol):
    """One client's dialogue. Methods raise RequestRefused."""

    def prompt(self, chat: Chat) -> list[int]:
        """Tokens of a chat, ready for the model's answer."""
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


class StatelessSession:
    """The session of plain serving: every request stands alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, chat: Chat) -> list[int]:
        return self._tokenizer.chat(
            chat.messages,
            tools=chat.tools,
            options=chat.options,
            add_generation_prompt=chat.add_generation_prompt,
        )

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
        given = (key or "").encode()
        # All are compared, so that the time tells nothing about them.
        if self._keys and not any([hmac.compare_digest(given, known) for known in self._keys]):
            raise RequestRefused(401, "the key is missing or wrong")
        return self._session
