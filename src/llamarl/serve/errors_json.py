"""Errors in the words of each dialect."""

from __future__ import annotations

from typing import Any

from llamarl.serve.refusals import RequestRefused
from llamarl.serve.replies import HttpReply, data_event, json_reply, named_event

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_reply(refusal: RequestRefused, path: str) -> HttpReply:
    """A refusal in the dialect of the path it was sent to."""
    headers = {"retry-after": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body may still come
    body = anthropic_error(refusal) if path.startswith("/v1/messages") else openai_error(refusal)
    return json_reply(body, status=refusal.status, headers=headers)


def openai_error(refusal: RequestRefused) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {
        "error": {
            "message": str(refusal),
            "type": kind,
            "param": refusal.field or None,
            "code": refusal.code or refusal.status,
        }
    }


def anthropic_error(refusal: RequestRefused) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def openai_error_event(reason: str) -> bytes:
    return data_event(openai_error(RequestRefused(500, reason)))


def anthropic_error_event(reason: str) -> bytes:
    return named_event("error", anthropic_error(RequestRefused(500, reason)))


def responses_error_event(reason: str) -> bytes:
    return named_event("error", {"type": "error", "code": "server_error", "message": reason, "param": None})
