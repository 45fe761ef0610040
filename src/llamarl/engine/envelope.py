"""What an executor sends to any engine: reports, and how its time was spent."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.messages import Report
from llamarl.observe.timeline import Span


class Envelope(Struct, frozen=True, array_like=True):
    """An executor's reports since the last envelope (none: a sign of life), and how its time was spent."""

    reports: tuple[Report, ...]
    spans: tuple[Span, ...]


encode = msgspec.msgpack.Encoder().encode
decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
