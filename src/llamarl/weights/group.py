"""A process group of ranks that publish and ranks that read, for weights that cannot go through shared memory.

Control messages and CPU tensors travel over gloo, tensors on GPUs over NCCL. Neither authenticates its peers: on one host,
ranks find each other through a memfd and talk over loopback; between hosts they need a network that the user trusts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work

from llamarl.errors import LlamaRLError
from llamarl.process_groups import LOOPBACK, NO_TIMEOUT, make_gloo_group, make_nccl_group, store_in
from llamarl.weights.wire import SlotShard

_CONNECT = 0  # tag of the first message between two ranks


class PeerLost(LlamaRLError):
    """A process of the group died, or did not answer in time."""


class RankShards(Struct, frozen=True):
    """The shards that one rank of the group publishes or reads."""

    shards: tuple[SlotShard, ...]


class Deadline:
    """One time limit for all the waits of a transfer."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._end_s - time.monotonic()))


class Group:
    """Ranks 0 to num_writers - 1 publish, the others read. Tensors are raw bytes or int64."""

    def __init__(
        self, store: Store, rank: int, num_writers: int, num_readers: int, *, interface: str, device: torch.device
    ) -> None:
        self.rank, self.num_writers, self.num_readers = rank, num_writers, num_readers
        size = num_writers + num_readers
        self._store = PrefixStore("weights", store)
        self._control: Any = make_gloo_group(PrefixStore("control", self._store), rank, size, interface)
        self._payload: Any = self._control
        self._device = device
        if device.type == "cuda":
            self._payload = make_nccl_group(PrefixStore("payload", self._store), rank, size, interface)

    @classmethod
    def on_this_host(
        cls, rendezvous_fd: int, rank: int, num_writers: int, num_readers: int, device: torch.device | None = None
    ) -> Group:
        """A group of processes of this host, which find each other through a memfd and talk over loopback."""
        store = store_in(rendezvous_fd, num_writers + num_readers)
        return cls(store, rank, num_writers, num_readers, interface=LOOPBACK, device=device or torch.device("cpu"))

    def exchange(self, own: RankShards, limit_s: float) -> list[RankShards]:
        """The shards of all ranks, by rank."""
        self._store.set_timeout(timedelta(seconds=limit_s))
        self._store.set(str(self.rank), msgspec.msgpack.encode(own))  # type: ignore[arg-type]
        size = self.num_writers + self.num_readers
        try:
            found = [self._store.get(str(rank)) for rank in range(size)]
        except RuntimeError as error:
            raise PeerLost(
                f"weights: not all of {size} ranks came to the rendezvous within {limit_s:g} s ({error})"
            ) from None
        return [msgspec.msgpack.decode(data, type=RankShards) for data in found]

    def connect(self, peer: int) -> None:
        """Connect a rank that publishes with one that reads; both call this. NCCL does so at the first transfer, which takes
        long and cannot be given a limit: too late while a slot is leased."""
        if self._payload is not self._control:
            first = torch.zeros(1, dtype=torch.uint8, device=self._device)
            begin = self.receive if peer < self.num_writers else self.send
            self.finish(begin(peer, first, _CONNECT), peer)

    def send_ints(self, peer: int, numbers: Sequence[int], tag: int, deadline: Deadline) -> None:
        data = torch.tensor(numbers, dtype=torch.int64)
        self.finish(self._begin(self._control.send, peer, data, tag), peer, deadline)

    def receive_ints(self, peer: int, count: int, tag: int, deadline: Deadline | None = None) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64)
        self.finish(self._begin(self._control.recv, peer, numbers, tag), peer, deadline)
        found: list[int] = numbers.tolist()
        return found

    def send(self, peer: int, data: Tensor, tag: int) -> Work:
        return self._begin(self._payload.send, peer, data, tag)

    def receive(self, peer: int, data: Tensor, tag: int) -> Work:
        return self._begin(self._payload.recv, peer, data, tag)

    def _begin(self, action: Any, peer: int, data: Tensor, tag: int) -> Work:
        try:
            work: Work = action([data], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from None
        return work

    def finish(self, work: Work, peer: int, deadline: Deadline | None = None) -> None:
        try:
            work.wait(deadline.left if deadline else NO_TIMEOUT)
        except RuntimeError as error:
            raise self._lost(peer, error) from None

    def close(self) -> None:
        """Aborts the group; peers that wait for this rank get an error."""
        self._control.abort()
        if self._payload is not self._control:
            self._payload.abort()

    def _lost(self, peer: int, error: RuntimeError) -> PeerLost:
        reader = peer - self.num_writers
        who = f"trainer rank {peer}" if reader < 0 else f"generator rank {reader}"
        return PeerLost(f"{who} was lost: {str(error).split('. ')[0].split('] ', 1)[-1]}")
