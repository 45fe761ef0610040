"""Serves the page on this machine only: loopback, a key in the address, reading requests alone, a strict content policy."""

from __future__ import annotations

import hmac
import secrets
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from llamarl.errors import InputError, LlamaRLError
from llamarl.view.data import NotThere, ViewData

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_HOSTS = ("127.0.0.1", "localhost")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MAX_PATH = 4096
_TIMEOUT_S = 30


class ViewServer(ThreadingHTTPServer):
    """The server of one page. `url` holds the key that lets a browser in."""

    daemon_threads = True

    def __init__(self, data: ViewData, port: int = 0) -> None:
        self.data, self.key = data, secrets.token_urlsafe(24)
        self.files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _TYPES}
        try:
            super().__init__(("127.0.0.1", port), partial(_Handler))
        except OSError as error:
            raise InputError(
                f"--port {port}: cannot be listened on: {error.strerror}; --port 0 takes a free one"
            ) from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?key={self.key}"

    @property
    def cookie(self) -> str:
        """Name of the cookie; it holds the port, since cookies of one host are shared by all ports."""
        return f"llamarl-view-{self.port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "llamarl", ""
    timeout = _TIMEOUT_S
    wbufsize = 1 << 16  # an answer leaves in one piece, without waiting for acknowledgments
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if len(self.path) > _MAX_PATH:
            return self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        if not self._is_local():
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this page is served as 127.0.0.1 or localhost only")
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query, keep_blank_values=False, max_num_fields=50))
        if split.path == "/" and "key" in query:
            return self._let_in(query["key"])
        if not self._knows_key():
            return self._refuse(HTTPStatus.FORBIDDEN, "open the address that `llamarl view` printed, with its key")
        name = "index.html" if split.path == "/" else split.path.removeprefix("/")
        if name in self.server.files:
            return self._send(HTTPStatus.OK, self.server.files[name], _TYPES[Path(name).suffix])
        if split.path.startswith("/api/"):
            return self._answer(split.path.removeprefix("/api/"), query)
        return self._refuse(HTTPStatus.NOT_FOUND, "nothing here")

    def _is_local(self) -> bool:
        """Whether the browser asked for this machine by name: a foreign name that resolves to loopback is an attack."""
        host = self.headers.get("Host", "")
        name, _, port = host.partition(":")
        return name in _HOSTS and (port == "" or port.isdigit())

    def _knows_key(self) -> bool:
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return False
        return morsel is not None and self._is_key(morsel.value)

    def _is_key(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.key.encode())

    def _let_in(self, key: str) -> None:
        """Turn the key of the address into a cookie, so that it does not stay in the browser's history."""
        if not self._is_key(key):
            return self._refuse(HTTPStatus.FORBIDDEN, "wrong key: open the address that `llamarl view` printed last")
        cookie = f"{self.server.cookie}={key}; HttpOnly; SameSite=Strict; Path=/"
        return self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Set-Cookie": cookie, "Location": "/"})

    def _answer(self, path: str, query: dict[str, str]) -> None:
        try:
            found = self.server.data.answer(path, query)
        except NotThere as error:
            return self._send_json(HTTPStatus.NOT_FOUND, {"error": str(error)})
        except LlamaRLError as error:
            return self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})
        return self._send_json(HTTPStatus.OK, found)

    def _send_json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, msgspec.json.encode(value), "application/json")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True
        self._send(status, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their addresses may hold the key."""
