"""Several processes that are one executor: rank 0 decides and tells the others over the executor's own process group.

On one host the group meets through a file without a name (a memfd), or through the engine, and talks over loopback, so
nothing is left behind and nobody outside this machine is listened to. Words travel as bytes; no object is ever pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from llamarl.messages import Message, decode_message, encode

# The deadlines are the engine's: `start_s` for the meeting, `silence_s` for all that follows. One of gloo's own would end
# an executor that has had nothing to do for so long, since gloo closes the connection when it expires.
_NO_TIMEOUT = timedelta(days=365)
LOOPBACK = "lo"
_NO_MESSAGE = b""  # "do a slice of work"


def meeting_in(fd: int, count: int) -> Store:
    """Where processes of one host meet that inherited this memfd."""
    return FileStore(f"/proc/self/fd/{fd}", count)


class Ranks:
    """A lone rank has nobody to tell; `tell` is then free."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def join(cls, rank: int, count: int, meeting: Callable[[], Store], interface: str) -> Ranks:
        if count > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=meeting(), rank=rank, world_size=count, timeout=_NO_TIMEOUT)
        return cls(rank, count)

    def tell(self, message: Message | None) -> None:
        if self.count > 1:
            data = encode(message) if message is not None else _NO_MESSAGE
            dist.broadcast(torch.tensor([len(data)]), src=0)
            if data:
                dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0)

    def listen(self) -> Message | None:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0)
        if not length.item():
            return None
        data = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        message: Message = decode_message(data.numpy().tobytes())
        return message
