"""What an executor sends to any engine: reports, how its time was spent, and what memory it holds."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.machine import MemoryPeak
from llamarl.messages import Report
from llamarl.observe.timeline import Span


class Envelope(Struct, frozen=True, array_like=True):
    """A rank's reports since the last envelope (none: a sign of life), how its time was spent, and the most memory that it
    has held, where that was looked at."""

    reports: tuple[Report, ...]
    spans: tuple[Span, ...]
    memory: MemoryPeak | None = None


encode = msgspec.msgpack.Encoder().encode
decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
