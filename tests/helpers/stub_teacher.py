"""An endpoint that scores tokens by a rule, in the words of `/inference/v1/generate`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from llamarl.config import Config
from llamarl.model.tokenizer import Tokenizer

SPOKEN = Tokenizer.load(Config().model_folder)


class StubEndpoint(HTTPServer):
    """Says that token t at place n has the log-prob -t - n / 100."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.statuses: list[int] = []  # to answer with first
        self.text: Callable[[int], str] = lambda token: SPOKEN.decode([token], skip_special_tokens=False)
        self.silent = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: StubEndpoint

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({**request, "path": self.path, "key": self.headers.get("Authorization")})
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        tokens = request["token_ids"]
        said: list[Any] = [None]
        said += [
            {str(token): {"logprob": -token - place / 100, "rank": 1, "decoded_token": self.server.text(token)}}
            for place, token in enumerate(tokens[1:], start=1)
        ]
        body = json.dumps({"choices": [], "prompt_logprobs": None if self.server.silent else said}).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def stub_endpoint() -> Iterator[StubEndpoint]:
    server = StubEndpoint()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
