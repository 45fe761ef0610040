"""Requests that are not answered: one line, with the HTTP status that fits."""

from __future__ import annotations

from llamarl.errors import LlamaRLError


class RequestRefused(LlamaRLError):
    """A request that cannot be answered. `field` names the part of the request that is at fault, if one is."""

    def __init__(self, status: int, reason: str, *, field: str = "", retry_after_s: int = 0) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.status, self.field, self.retry_after_s = status, field, retry_after_s


def bad_request(field: str, reason: str) -> RequestRefused:
    return RequestRefused(400, reason, field=field)
