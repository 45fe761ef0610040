"""What the engine and the nursery tell each other, and what an executor sends along with a report."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.config import Config
from llamarl.messages import Report
from llamarl.observe.timeline import Span


class AboutRank(Struct, frozen=True, tag=True):
    executor: str
    incarnation: int
    rank: int

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.executor, self.incarnation, self.rank


class Birth(AboutRank, frozen=True):
    """One rank of an executor to be forked. Descriptors come with it: socket, log, meeting point, then those of the slot
    files."""

    num_ranks: int
    builder: str  # MODULE:FUNCTION or FILE.py:FUNCTION
    config: Config
    weights_source: dict[str, str]
    slots: tuple[str, ...]  # publishing roles whose slot files are handed over, in the order of the descriptors
    threads: int
    snapshot: str  # a folder, or nothing


class Kill(AboutRank, frozen=True):
    pass


class Born(AboutRank, frozen=True):
    pid: int


class Obituary(AboutRank, frozen=True):
    reason: str


class Envelope(Struct, frozen=True, array_like=True):
    """What an executor sends: its reports since the last time, maybe none (a sign of life), and how its time was spent."""

    reports: tuple[Report, ...]
    spans: tuple[Span, ...]


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Birth | Kill).decode
decode_news = msgspec.msgpack.Decoder(Born | Obituary).decode
decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
