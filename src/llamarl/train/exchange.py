"""Small messages between the ranks of one executor, as bytes: no object is ever pickled."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from llamarl.train.mesh import TrainerMesh


class Written(Struct, frozen=True):
    files: dict[str, str]
    problem: str


class Exchange:
    """Collectives: all ranks call each method at the same time. With one rank, they are no-ops."""

    def __init__(self, mesh: TrainerMesh) -> None:
        self._count = mesh.size

    def all_true(self, flag: bool) -> bool:
        if self._count == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        return bool(flags.item())

    def merge(self, files: dict[str, str], problem: str) -> tuple[dict[str, str], str]:
        """The files of all ranks, and the first problem of any rank."""
        found = [msgspec.json.decode(data, type=Written) for data in self._gather(Written(files, problem))]
        every = {name: digest for one in found for name, digest in one.files.items()}
        return every, next((one.problem for one in found if one.problem), "")

    def _gather(self, message: Struct) -> list[bytes]:
        data = msgspec.json.encode(message)
        if self._count == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._count)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._count)]
        dist.all_gather(padded, mine)
        return [one.numpy().tobytes()[: int(length)] for one, length in zip(padded, lengths, strict=True)]
