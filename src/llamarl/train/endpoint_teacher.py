"""A teacher behind HTTP: `POST /inference/v1/generate` with `prompt_logprobs`, as `llamarl serve` and vLLM have it."""

from __future__ import annotations

import ipaddress
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from llamarl.algo.batch import document_of
from llamarl.algo.streams import TEACHER_LOGPROBS
from llamarl.config import TeacherConfig
from llamarl.config.teacher import THE_TEACHER
from llamarl.errors import ConfigError, InputError
from llamarl.types import Rollout, RolloutGroup, floats_to_bytes

_PATH = "/inference/v1/generate"
_REQUESTS = 8  # under way at a time
_TIMEOUT_S = 300.0
_RETRIES = 4
_FIRST_PAUSE_S = 0.5
_MAX_REPLY_BYTES = 1 << 28
_BUSY = (408, 429, 500, 502, 503, 504)


class EndpointFailed(InputError):
    """The endpoint cannot be asked, or its reply is not what was asked for."""


class EndpointTeacher:
    """Asks for the log-probs of tokens that somebody else has sampled. No proxy and no redirect is followed."""

    def __init__(self, settings: TeacherConfig) -> None:
        self._url = settings.url.rstrip("/") + _PATH
        self._headers = {"Content-Type": "application/json", **_authorization(settings)}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def add_column(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        """Groups with the teacher's log-probs of the sampled tokens."""
        with ThreadPoolExecutor(_REQUESTS) as pool:
            asked = [
                [pool.submit(self._with_column, group, one) for one in group.rollouts]
                if group.prompt.teacher == THE_TEACHER
                else None
                for group in groups
            ]
            return tuple(
                group if answers is None else replace(group, rollouts=tuple(one.result() for one in answers))
                for group, answers in zip(groups, asked, strict=True)
            )

    def scored(self, tokens: Sequence[int]) -> list[Mapping[str, Any]]:
        """What the endpoint says of each token but the first: its log-prob and its text."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        reply = self._ask(json.dumps({"token_ids": list(tokens), "sampling_params": params}).encode())
        try:
            found = reply["prompt_logprobs"]
            places = zip(tokens[1:], found[1:], strict=True)
            scored = [place[str(token)] for token, place in places]
            assert all(isinstance(one["logprob"], int | float) for one in scored)
        except (KeyError, TypeError, ValueError, AssertionError):
            raise EndpointFailed(f"{self._url} gives no prompt_logprobs of the tokens that were sent") from None
        return scored

    def _with_column(self, group: RolloutGroup, rollout: Rollout) -> Rollout:
        document = document_of(group.prompt, rollout.completion, version=0)
        scored = self.scored(document.tokens.tolist())
        column = floats_to_bytes([scored[place - 1]["logprob"] for place in document.places])
        return replace(rollout, columns={**rollout.columns, TEACHER_LOGPROBS: column})

    def _ask(self, body: bytes) -> Any:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(_RETRIES + 1):
            try:
                request = urllib.request.Request(self._url, body, self._headers)
                with self._opener.open(request, timeout=_TIMEOUT_S) as reply:
                    return json.loads(reply.read(_MAX_REPLY_BYTES))
            except urllib.error.HTTPError as error:
                if error.code not in _BUSY or attempt == _RETRIES:
                    raise EndpointFailed(f"{self._url} answers {error.code} {error.reason}") from None
            except (OSError, ValueError) as error:
                if attempt == _RETRIES or isinstance(error, ValueError):
                    raise EndpointFailed(f"{self._url} cannot be asked: {error}") from None
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """The key is meant for this endpoint alone."""


def _authorization(settings: TeacherConfig) -> dict[str, str]:
    if not settings.key_env:
        return {}
    key, parts = os.environ.get(settings.key_env, ""), urlsplit(settings.url)
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(f"teacher.key_env: the environment variable {settings.key_env} holds no key")
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise ConfigError("teacher.url: a key is sent over https, or to this machine itself, and nowhere else")
    return {"Authorization": f"Bearer {key}"}


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
