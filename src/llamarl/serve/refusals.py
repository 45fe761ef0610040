"""Requests that are not answered: one line, with the HTTP status that fits."""

from __future__ import annotations

from llamarl.errors import LlamaRLError


class RequestRefused(LlamaRLError):
    """A request that cannot be answered. `field` names the part of the request that is at fault, if one is; `code` is a word
    that programs know."""

    def __init__(self, status: int, reason: str, *, field: str = "", code: str = "", retry_after_s: int = 0) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.status, self.field, self.code, self.retry_after_s = status, field, code, retry_after_s


def bad_request(field: str, reason: str) -> RequestRefused:
    return RequestRefused(400, reason, field=field)


def too_long(field: str, reason: str) -> RequestRefused:
    """A prompt beyond what can be answered, with the code that OpenAI's clients know."""
    return RequestRefused(400, reason, field=field, code="context_length_exceeded")
