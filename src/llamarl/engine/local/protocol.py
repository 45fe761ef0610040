"""What the engine and the nursery tell each other."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.config import Config


class AboutRank(Struct, frozen=True, tag=True):
    executor: str
    incarnation: int
    rank: int

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.executor, self.incarnation, self.rank


class ForkRank(AboutRank, frozen=True):
    """One rank of an executor to be forked. Descriptors come with it: socket, log, meeting point, then those of the slot
    files."""

    num_ranks: int
    builder: str  # MODULE:FUNCTION or FILE.py:FUNCTION
    config: Config
    weights_source: dict[str, str]
    first_gpus: dict[str, int]
    slots: tuple[str, ...]  # publishing roles whose slot files are handed over, in the order of the descriptors
    threads: int
    snapshot: str  # a folder, or nothing


class KillFork(AboutRank, frozen=True):
    pass


class RankForked(AboutRank, frozen=True):
    pid: int


class RankExited(AboutRank, frozen=True):
    reason: str


decode_order = msgspec.msgpack.Decoder(ForkRank | KillFork).decode
decode_news = msgspec.msgpack.Decoder(RankForked | RankExited).decode
