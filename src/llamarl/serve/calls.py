"""One request on its way through a dialect: who asks, what was sent, and what every dialect needs to answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.serve.answers import PromptAnswers, TextAnswer
from llamarl.serve.backend import Ask, Backend
from llamarl.serve.fields import check_length, check_tokens
from llamarl.serve.limits import ServeLimits
from llamarl.serve.metrics import Metrics
from llamarl.serve.refusals import bad_request
from llamarl.serve.replies import VERSION_HEADER, EventStream, HttpReply
from llamarl.serve.session import Chat, Session
from llamarl.serve.token_json import TokenNames
from llamarl.serve.tool_calls import tool_form
from llamarl.types import VersionRun


@dataclass(frozen=True, kw_only=True)
class ClientCall:
    """A request with its body, whose sender is known."""

    backend: Backend
    session: Session
    limits: ServeLimits
    metrics: Metrics
    names: TokenNames
    headers: Mapping[str, str]
    body: bytes

    def prompt(self, chat: Chat) -> list[int]:
        """Tokens of a chat, checked against the model."""
        if chat.tools and tool_form(self.backend.tokenizer.chat_source) is None:
            raise bad_request("tools", "the model's chat template takes no tools")
        check_length(self.backend, (chat.messages, chat.tools, chat.options), "messages")
        tokens = self.session.prompt(chat)
        check_tokens(self.backend, tokens, "messages")
        return tokens

    def answers(self, ask: Ask, chat: Chat | None = None) -> PromptAnswers:
        """Calls of tools are looked for only where the request has tools."""
        form = tool_form(self.backend.tokenizer.chat_source) if chat is not None and chat.tools else None
        return PromptAnswers(self.backend, self.session, self.metrics, ask, chat=chat, form=form)

    @property
    def version_header(self) -> dict[str, str]:
        """The version as a stream begins; its tokens may be of later ones."""
        return {VERSION_HEADER: str(self.backend.version)}

    def version_header_of(self, answers: Sequence[TextAnswer]) -> dict[str, str]:
        """The newest version that sampled any of the answers."""
        versions = [run.version for answer in answers for run in answer.versions]
        return {VERSION_HEADER: str(max(versions, default=self.backend.version))}


Handler = Callable[[ClientCall], Awaitable[HttpReply | EventStream]]


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def now_s() -> int:
    return int(time.time())


def runs_of(versions: Sequence[VersionRun]) -> list[tuple[int, int]]:
    """Runs as clients see them: pairs of version and number of tokens."""
    return [(run.version, run.count) for run in versions]


def openai_usage(num_prompt: int, num_sampled: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
