"""A judge's endpoint on loopback: OpenAI's chat completions with the replies that a test chooses."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    path: str
    key: str
    body: dict[str, Any]

    @property
    def shown(self) -> str:
        return str(self.body["messages"][1]["content"])

    @property
    def nonce(self) -> str:
        found = re.search(r"SCORE-([0-9a-f]+): N", self.body["messages"][0]["content"])
        assert found is not None
        return found.group(1)

    @property
    def answer(self) -> str:
        return self.shown.split(f"<answer-{self.nonce}>\n")[1].split(f"\n</answer-{self.nonce}>")[0]


Behave = Callable[[Request], str | tuple[int, bytes]]  # returns the judge's reply, or a status and a body


@contextmanager
def stub_judge(behave: Behave) -> Iterator[tuple[str, list[Request]]]:
    """Yield the endpoint's URL and the list of all requests so far."""
    seen: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = Request(self.path, self.headers.get("Authorization", ""), body)
            seen.append(request)
            said = behave(request)
            status, data = said if isinstance(said, tuple) else (200, _completion(said))
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status in (301, 302, 307):
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def _completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
