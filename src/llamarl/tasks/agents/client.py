"""What an agent is given to talk to the policy with: an address, a key, and clients made from both."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError

from msgspec import Struct
from msgspec.structs import replace

_MAX_SAID = 500
TOO_LONG = "context_length_exceeded"  # the server's code for a prompt that does not fit


class AskRefused(RuntimeError):
    """The server did not answer. `code` is the server's word for the reason, or its HTTP status."""

    def __init__(self, told: str, code: str | int) -> None:
        super().__init__(told)
        self.code = code


class AgentClient(Struct, frozen=True):
    """The address and key of one session. Everything that is asked with this key is one sample, and is trained on."""

    url: str  # of the server, without a path
    api_key: str
    model: str  # name of the policy, for clients that must give one

    @property
    def base_url(self) -> str:
        """Address for clients of the OpenAI API."""
        return f"{self.url}/v1"

    def openai(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` for this session; needs the package `openai`. Options are passed on."""
        import openai

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def anthropic(self, **options: Any) -> Any:
        """An `anthropic.AsyncAnthropic` for this session; needs the package `anthropic`. Options are passed on."""
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.api_key, **options)

    async def chat(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """Ask for one answer to a chat, without any package. Returns the model's message as `/v1/chat/completions` does."""
        body = {"model": self.model, "messages": list(messages), **fields}
        answer = await asyncio.to_thread(self._post, "/v1/chat/completions", body)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def player(self, number: int) -> AgentClient:
        """A client for another side of the same game, with a session and a reward of its own; 0 is this one."""
        known = self.api_key.partition(".")[0]
        return replace(self, api_key=f"{known}.{number}" if number else known)

    async def reward(self, value: float) -> None:
        """Add to the reward of this session, as `POST /rl/reward` does."""
        await asyncio.to_thread(self._post, "/rl/reward", {"reward": value})

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a program finds the session."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "LLAMARL_URL": self.url,
            "LLAMARL_MODEL": self.model,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request) as answer:
                return json.load(answer)
        except HTTPError as error:
            said = error.read().decode(errors="replace")
            raise AskRefused(f"{path}: status {error.code}: {said[:_MAX_SAID]}", _code_in(said) or error.code) from None


def _code_in(said: str) -> str:
    """The word for the reason in an answer of the server; empty if there is none."""
    try:
        code = json.loads(said)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return ""
    return code if isinstance(code, str) else ""
