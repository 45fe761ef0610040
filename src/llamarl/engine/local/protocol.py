"""What the engine and the fork server tell each other: orders one way, news the other."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.config import Config


class AboutRank(Struct, frozen=True, tag=True):
    """Names one rank of one start of an executor."""

    executor: str
    incarnation: int
    rank: int

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.executor, self.incarnation, self.rank


class ForkRank(AboutRank, frozen=True):
    """Order to fork one rank of an executor. Descriptors come with it: socket, log, rendezvous, then the slot files."""

    num_ranks: int
    builder: str  # MODULE:FUNCTION or FILE.py:FUNCTION
    config: Config
    weights_source: dict[str, str]
    first_gpus: dict[str, int]
    slots: tuple[str, ...]  # publishing roles, in the order of the descriptors of their slot files
    threads: int
    snapshot: str  # a folder; empty: from the beginning
    variables: dict[str, str]  # of its environment: the MPS daemon to join, and its share of the GPU; empty: none


class KillFork(AboutRank, frozen=True):
    """Order to kill the process of a rank."""


class RankForked(AboutRank, frozen=True):
    """News: the process of a rank exists."""

    pid: int


class RankExited(AboutRank, frozen=True):
    """News: the process of a rank ended, or could not be forked."""

    reason: str


decode_order = msgspec.msgpack.Decoder(ForkRank | KillFork).decode
decode_news = msgspec.msgpack.Decoder(RankForked | RankExited).decode
