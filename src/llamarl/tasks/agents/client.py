"""What an agent is given to talk to the policy with: an address, a key, and clients made from both."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError

from msgspec import Struct

_MAX_SAID = 500


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
            said = error.read().decode(errors="replace")[:_MAX_SAID]
            raise RuntimeError(f"{path}: status {error.code}: {said}") from None
