"""The endpoint of a job: the application on a loopback port, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import weakref
from typing import Any

from llamarl.errors import ConfigError
from llamarl.serve.app import make_app
from llamarl.serve.call_backend import CallBackend
from llamarl.serve.limits import ServeLimits
from llamarl.serve.session_access import SessionAccess


class SessionEndpoint:
    """Serves the sessions of one executor until it is closed or forgotten."""

    def __init__(self, backend: CallBackend, access: SessionAccess, limits: ServeLimits) -> None:
        uvicorn = load_uvicorn()
        self.backend, self.access = backend, access
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(backend, access, limits), log_level="warning", access_log=False, lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)
        self._thread = threading.Thread(target=_serve, args=(server, listener), daemon=True, name="endpoint")
        self.close = weakref.finalize(self, _stop, server, self._thread)
        self._thread.start()


def load_uvicorn() -> Any:
    try:
        import uvicorn
    except ImportError:
        raise ConfigError("agent: needs the server's packages: pip install 'llamarl[serve]'") from None
    return uvicorn


def _serve(server: Any, listener: socket.socket) -> None:
    with listener:
        server.run(sockets=[listener])


def _stop(server: Any, thread: threading.Thread) -> None:
    server.should_exit = server.force_exit = True
    if thread is not threading.current_thread():
        thread.join(timeout=5.0)
