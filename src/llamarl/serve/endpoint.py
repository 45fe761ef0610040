"""The endpoint of a job: the application on a loopback port, in a thread of its own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from llamarl.errors import ConfigError
from llamarl.serve.app import make_app
from llamarl.serve.call_backend import CallBackend
from llamarl.serve.limits import ServeLimits
from llamarl.serve.session_access import SessionAccess

if TYPE_CHECKING:
    from llamarl.serve.run import HttpServer


class SessionEndpoint:
    """Serves the sessions of one executor until it is closed or forgotten."""

    def __init__(self, backend: CallBackend, access: SessionAccess, limits: ServeLimits) -> None:
        self.backend, self.access = backend, access
        server = load_server()(make_app(backend, access, limits), limits)
        self.url = server.url
        self.close = weakref.finalize(self, _end, server)
        server.start()


def _end(server: HttpServer) -> None:
    """Answers under way are not waited for: no generator gives them any more."""
    server.stop()
    server.close()


def load_server() -> type[HttpServer]:
    """The HTTP server, whose packages are an extra."""
    try:
        from llamarl.serve.run import HttpServer
    except ImportError as error:
        raise ConfigError(f"agent: needs the packages of the server: pip install 'llamarl[serve]' ({error})") from None
    return HttpServer
