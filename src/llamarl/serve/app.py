"""The ASGI application: finds the handler of a path, lets in who may ask, and turns every failure into one line.

In this order: the key, the number of requests, the size of the body, the body, its fields. So nobody without a key costs more
than a comparison, and nothing is read that will be refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from urllib.parse import unquote

from llamarl.errors import InputError
from llamarl.serve.about import detokenize, list_models, show_metrics, show_model, take_reward, tokenize
from llamarl.serve.anthropic_messages import answer_messages, count_tokens
from llamarl.serve.backend import Backend
from llamarl.serve.calls import ClientCall, Handler
from llamarl.serve.errors_json import error_reply
from llamarl.serve.generate_tokens import answer_generate
from llamarl.serve.limits import ServeLimits
from llamarl.serve.metrics import Metrics
from llamarl.serve.openai_chat import answer_chat
from llamarl.serve.openai_completions import answer_completion
from llamarl.serve.openai_responses import answer_responses
from llamarl.serve.refusals import RequestRefused
from llamarl.serve.replies import (
    EventStream,
    HttpReply,
    Receive,
    Scope,
    Send,
    json_reply,
    send_event,
    send_reply,
    send_start_of_stream,
)
from llamarl.serve.session import Access, Session
from llamarl.serve.token_json import TokenNames

ROUTES: Mapping[tuple[str, str], Handler] = {
    ("POST", "/v1/chat/completions"): answer_chat,
    ("POST", "/v1/completions"): answer_completion,
    ("POST", "/v1/messages"): answer_messages,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/v1/responses"): answer_responses,
    ("POST", "/inference/v1/generate"): answer_generate,
    ("GET", "/v1/models"): list_models,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("GET", "/metrics"): show_metrics,
    ("POST", "/rl/reward"): take_reward,
}
_PATHS = {path for _, path in ROUTES}
_RETRY_S = 1
_MOST_DISCARDED = 32  # bodies of the largest size that are read and thrown away, before a client is cut off
log = logging.getLogger("llamarl.serve")


class ServeApp:
    """The application of one backend; see the module's docstring."""

    def __init__(self, backend: Backend, access: Access, limits: ServeLimits) -> None:
        self._backend, self._access, self._limits = backend, access, limits
        self.metrics, self._names = Metrics(), TokenNames(backend.tokenizer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. While it is answered, the connection is watched: a client that goes away ends the sampling."""
        started, metrics = time.monotonic(), self.metrics
        name = scope["path"] if scope["path"] in _PATHS else "other"
        body_read = asyncio.Event()
        work = asyncio.ensure_future(self._work(scope, receive, send, body_read))
        watch = asyncio.ensure_future(_wait_until_gone(receive, body_read))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                metrics.cancelled += 1
                work.cancel()
            status = await work
            metrics.requests[name, status] += 1
        except asyncio.CancelledError:
            work.cancel()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        except OSError:
            metrics.cancelled += 1  # the client is gone; without an end, its connection is closed
        finally:
            watch.cancel()
            metrics.seconds[name] += time.monotonic() - started

    async def _work(self, scope: Scope, receive: Receive, send: Send, body_read: asyncio.Event) -> int:
        """Answer, and return the status."""
        path = scope["path"]
        try:
            reply = await self._reply(scope, receive, body_read)
            if isinstance(reply, EventStream):
                return await self._stream(reply, path, send)
        except RequestRefused as refusal:
            reply = error_reply(refusal, path)
        except InputError as error:  # of the chat template or its options
            reply = error_reply(RequestRefused(400, str(error)), path)
        except UnicodeError:
            reply = error_reply(RequestRefused(400, "the text is not valid unicode"), path)
        except Exception as error:
            reply = error_reply(self._unexpected(error, path), path)
        await send_reply(reply, send)
        return reply.status

    async def _stream(self, stream: EventStream, path: str, send: Send) -> int:
        """Send events as they come. What goes wrong before the first one still has a status of its own."""
        first = await anext(stream.events)
        await send_start_of_stream(stream, send)
        await send_event(first, send)
        try:
            async for event in stream.events:
                await send_event(event, send)
        except (RequestRefused, InputError) as error:
            await send_event(stream.describe_failure(str(error)), send)
        except OSError:
            raise
        except Exception as error:
            await send_event(stream.describe_failure(str(self._unexpected(error, path))), send)
        await send_event(b"", send, more=False)
        return 200

    def _unexpected(self, error: Exception, path: str) -> RequestRefused:
        """A fault of ours: the log has the traceback, which holds nothing of the request; the client only learns of it."""
        log.error("%s failed: %s", path if path in _PATHS else "a request", type(error).__name__, exc_info=error)
        return RequestRefused(500, "an error inside the server; its log says more")

    async def _reply(self, scope: Scope, receive: Receive, body_read: asyncio.Event) -> HttpReply | EventStream:
        path, headers = scope["path"], _headers(scope)
        if path == "/health" and scope["method"] in ("GET", "HEAD"):
            body_read.set()
            return self._health()
        session = self._access.session(_key(headers), headers)
        handler = self._handler(scope["method"], path)
        if self.metrics.in_flight >= self._limits.max_requests:
            raise RequestRefused(
                429, f"{self.metrics.in_flight} requests are being answered; come back later", retry_after_s=_RETRY_S
            )
        self.metrics.in_flight += 1
        try:
            body = await self._body(headers, receive)
            body_read.set()
            reply = await handler(self._call(session, headers, body))
        except BaseException:
            self.metrics.in_flight -= 1
            raise
        if isinstance(reply, EventStream):
            return EventStream(
                events=self._counted(reply), headers=reply.headers, describe_failure=reply.describe_failure
            )
        self.metrics.in_flight -= 1
        return reply

    async def _counted(self, stream: EventStream) -> AsyncGenerator[bytes, None]:
        """The events of a stream, which counts as being answered until its end."""
        try:
            async for event in stream.events:
                yield event
        finally:
            self.metrics.in_flight -= 1
            await stream.events.aclose()

    def _handler(self, method: str, path: str) -> Handler:
        if handler := ROUTES.get((method, path)):
            return handler
        if method == "GET" and path.startswith("/v1/models/"):
            if unquote(path.removeprefix("/v1/models/")) != self._backend.name:
                raise RequestRefused(404, f"there is one model here: {self._backend.name}")
            return show_model
        if path in _PATHS:
            raise RequestRefused(405, "this path does not take the method")
        raise RequestRefused(404, "there is no such path; docs/endpoint.md lists them")

    def _call(self, session: Session, headers: Mapping[str, str], body: bytes) -> ClientCall:
        return ClientCall(
            backend=self._backend,
            session=session,
            limits=self._limits,
            metrics=self.metrics,
            names=self._names,
            headers=headers,
            body=body,
        )

    def _health(self) -> HttpReply:
        if self._backend.failure:
            return json_reply({"status": "failed"}, status=503)
        return json_reply({"status": "ok"})

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """The body of a request. One that is too large is read to its end, though not kept, since a client that is cut off
        while it sends does not see why."""
        limits = self._limits
        said = headers.get("content-length", "")
        too_large = said.isdecimal() and int(said) > limits.max_body_bytes
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in _parts(receive):
                    size += len(part)
                    too_large = too_large or size > limits.max_body_bytes
                    if not too_large:
                        parts.append(part)
                    elif size > _MOST_DISCARDED * limits.max_body_bytes:
                        break
        except TimeoutError:
            if not too_large:
                raise RequestRefused(408, f"the body did not arrive within {limits.body_s:g} s") from None
        if too_large:
            raise RequestRefused(413, f"the body has more than {limits.max_body_bytes} bytes")
        return b"".join(parts)


async def _parts(receive: Receive) -> AsyncGenerator[bytes, None]:
    """The parts of a body as they come."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        yield message.get("body", b"")
        more = message.get("more_body", False)


def make_app(backend: Backend, access: Access, limits: ServeLimits) -> ServeApp:
    """The application that answers every dialect from this backend, for those whom `access` lets in."""
    return ServeApp(backend, access, limits)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _key(headers: Mapping[str, str]) -> str | None:
    """The key of a request: `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


async def _wait_until_gone(receive: Receive, body_read: asyncio.Event) -> None:
    await body_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
