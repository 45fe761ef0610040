"""What crosses between the engine and a rank: MessagePack bytes, which Monarch carries and does not look into."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.config import Config
from llamarl.engine.envelope import Envelope


class RankSpec(Struct, frozen=True):
    """One or more ranks of an executor, on one host."""

    executor: str
    incarnation: int
    first_rank: int
    num_ranks: int  # of the whole executor
    builder: str  # MODULE:FUNCTION or FILE.py:FUNCTION
    config: Config
    weights_source: dict[str, str]  # reading role -> publishing role
    first_gpus: dict[str, int]
    threads: int
    snapshot: str  # a folder; empty: from the beginning
    log: str
    interface: str  # over which its ranks talk to each other
    gpus: tuple[int | None, ...]  # of the host, one for each of the ranks; None: the role uses none
    network: str  # the interface for weights that cross hosts
    num_writers: int  # ranks of the role that publishes, where weights cross hosts; 0: they stay on one


class RankMessage(Struct, frozen=True, tag=True):
    """A message from a rank to the engine."""


class RankStarted(RankMessage, frozen=True):
    pid: int


class RankReport(RankMessage, frozen=True):
    envelope: Envelope


class RankStopped(RankMessage, frozen=True):
    """The rank was asked to stop, and has."""


class StoreRequest(RankMessage, frozen=True):
    """An operation on a rendezvous store, kept by the engine, in which the ranks of a process group find each other."""

    number: int  # by which the answer comes back
    rendezvous: str
    operation: str
    key: str
    value: bytes = b""
    expected: bytes = b""


class RendezvousCall(RankMessage, frozen=True):
    """A reader asks all ranks that publish to join a rendezvous."""

    rendezvous: str
    num_readers: int


AnyRankMessage = RankStarted | RankReport | RankStopped | StoreRequest | RendezvousCall

encode = msgspec.msgpack.Encoder().encode
decode_rank_message = msgspec.msgpack.Decoder(AnyRankMessage).decode
decode_spec = msgspec.msgpack.Decoder(RankSpec).decode
