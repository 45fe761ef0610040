"""What a handler gives back, and how it goes to the client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec
from msgspec import Struct

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

VERSION_HEADER = "x-weight-version"
_ENCODER = msgspec.json.Encoder()


class HttpReply(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}
    content_type: str = "application/json"


class EventStream(Struct, frozen=True, kw_only=True):
    """Server-sent events, each written as soon as it is there."""

    events: AsyncGenerator[bytes, None]
    headers: Mapping[str, str] = {}
    describe_failure: Callable[[str], bytes]  # the event that ends a stream which cannot go on


def to_json(value: Any) -> bytes:
    """JSON bytes; `msgspec.Raw` parts are copied as they are."""
    return _ENCODER.encode(value)


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpReply:
    return HttpReply(body=to_json(value), status=status, headers=headers or {})


def data_event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


async def send_reply(reply: HttpReply, send: Send) -> None:
    headers = {"content-type": reply.content_type, "content-length": str(len(reply.body)), **reply.headers}
    await send({"type": "http.response.start", "status": reply.status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": reply.body})


async def send_start_of_stream(stream: EventStream, send: Send) -> None:
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **stream.headers}
    await send({"type": "http.response.start", "status": 200, "headers": _encoded(headers)})


async def send_event(event: bytes, send: Send, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": more})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
