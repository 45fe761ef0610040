"""Several processes that are one executor: rank 0 decides, and tells the others over the executor's own process group."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store

from llamarl.messages import Message, decode_message, encode
from llamarl.process_groups import broadcast_bytes, join_group

_NO_MESSAGE = b""  # "do a slice of work"


class Ranks:
    """The ranks of one executor, as seen by one of them. With one rank, `tell` is a no-op."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def join(
        cls, rank: int, count: int, store: Callable[[], Store], interface: str, *, nccl_interface: str = ""
    ) -> Ranks:
        join_group(store, rank, count, interface, nccl_interface=nccl_interface)
        return cls(rank, count)

    def tell(self, message: Message | None) -> None:
        """Rank 0: pass a message on to all others; None asks them for a slice of work."""
        if self.count > 1:
            broadcast_bytes(encode(message) if message is not None else _NO_MESSAGE)

    def listen(self) -> Message | None:
        """Any other rank: wait for what rank 0 tells."""
        data = broadcast_bytes()
        message: Message | None = decode_message(data) if data else None
        return message
