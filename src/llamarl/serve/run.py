"""Runs the application behind uvicorn, in the main thread or in one of its own, and stops it without cutting answers off."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llamarl.errors import InputError, JobFailed
from llamarl.serve.app import ServeApp
from llamarl.serve.limits import ServeLimits

LOOPBACK = "127.0.0.1"
_MAX_HEAD_BYTES = 64 << 10
_KEEP_ALIVE_S = 30
_BACKLOG = 4096
_SPARE_FILES = 256  # file descriptors that are no connections
_START_S = 30.0


def guarded_protocol(limits: ServeLimits) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, for clients that may be hostile: it limits connections, the time and size of headers, and how long
    a client may take nothing in of what is sent to it."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = max(1, min(limits.max_connections, files - _SPARE_FILES))

    class GuardedProtocol(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
            else:
                self._watch_headers(0)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_headers(len(data))

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            self._stop_write_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader(sys.maxsize)

        def resume_writing(self) -> None:
            self._stop_write_timer()
            super().resume_writing()

        def _watch_reader(self, unsent_bytes: int) -> None:
            """Cut off a client that took in nothing of what is ready for it since the last look."""
            left_bytes = self.transport.get_write_buffer_size()
            if left_bytes >= unsent_bytes:
                # Without lingering, the kernel throws away what it still holds for the client.
                reset = struct.pack("ii", 1, 0)
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                self.transport.abort()
                return
            self._write_timer = self.loop.call_later(limits.write_s, self._watch_reader, left_bytes)

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def _watch_headers(self, num_bytes: int) -> None:
            """Give up on a connection that does not send the headers of a request in time, or far too many; nor is the rest
            of a body awaited for long that was refused."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
                self._head_bytes = 0
                return
            refused = self.cycle is not None and self.cycle.more_body
            self._head_bytes += 0 if refused else num_bytes
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.abort()
            elif self._timer is None:
                self._timer = self.loop.call_later(limits.header_s, self._give_up)

        def _give_up(self) -> None:
            self._timer = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return GuardedProtocol


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """An application on a port."""

    def __init__(self, app: ServeApp, limits: ServeLimits, *, host: str = LOOPBACK, port: int = 0) -> None:
        """`port` 0: a free one. The port is taken here; nothing is answered before `run` or `start`."""
        _allow_many_files()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # every hostile client would write a line
        self._socket = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http=guarded_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(limits.grace_s)),
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run_in_thread, name="http", daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or Ctrl-C; answers under way are finished, within the time that the limits give. `ready` is
        called once the server answers."""
        asyncio.run(self._run(ready))

    async def _run(self, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        watch = asyncio.ensure_future(self._when_started(ready))
        await self._server.serve(sockets=[self._socket])
        watch.cancel()

    async def _when_started(self, ready: Callable[[], None]) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        ready()

    def start(self) -> None:
        """Serve in a thread, until `close`."""
        self._thread.start()
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        waiting = threading.Event()
        for _ in range(int(_START_S / 0.01)):
            if self._server.started:
                return
            waiting.wait(0.01)
        raise JobFailed("the HTTP server did not start")

    def _run_in_thread(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def stop(self) -> None:
        """Take no new connections, and end once running answers have ended; a second call ends them at once."""
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True

    def close(self) -> None:
        """Stop a server that was started in a thread, and wait for its end."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's delay off; without, every answer may wait 40 ms for its second part.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InputError(
            f"{host}:{port}: cannot be listened on: {error.strerror or error}; port 0 takes a free one"
        ) from None
    listening.setblocking(False)
    return listening


def _allow_many_files() -> None:
    """Every connection is a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
