"""How much a server takes on at once, and how long it waits."""

from __future__ import annotations

from msgspec import Struct


class ServeLimits(Struct, frozen=True, kw_only=True):
    max_body_bytes: int = 8 << 20  # of one request; more is refused with 413
    max_requests: int = 4096  # requests answered or waiting at once; more are told to come back later, with 429
    max_answers: int = 128  # answers to one prompt
    max_connections: int = 16_384  # open at once; more are closed as they come
    header_s: float = 15.0  # until a connection has sent the headers of its next request
    body_s: float = 30.0  # until the body has followed
    write_s: float = 60.0  # until a client has taken in what was sent
    grace_s: float = 30.0  # for running answers, once the server is told to stop
