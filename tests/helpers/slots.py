"""Weights to publish, and helpers that inspect a slot file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from llamarl.weights.rank_slots import find
from llamarl.weights.slot_file import MAX_RANKS, SlotFile
from llamarl.weights.slots import SlotWriter
from llamarl.weights.wire import SlotShard

LEASE_S = 0.2

HOLD_A_LEASE = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), getattr(fcntl, sys.argv[3]), 1, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def random_weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights of awkward sizes: less than a cache line, many chunks of a checksum, and a single number."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (301, 67), "norm": (5,), "scale": (), "big": (3, 128, 211)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def zeros_like(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(
            one[name].contiguous().view(-1).view(torch.uint8), other[name].contiguous().view(-1).view(torch.uint8)
        )
        for name in one
    )


def bytes_of_slot(file: SlotFile, slot: int) -> Tensor:
    return find(file, rank=0, device=-1).memory.data(slot)


def slot_shards_of(file: SlotFile) -> dict[str, SlotShard]:
    return {shard.name: shard for shard in find(file, rank=0, device=-1).manifest.shards}


def num_bytes_of(weights: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in weights.values())


def writer_of(file: SlotFile, weights: dict[str, Tensor], lease_s: float = LEASE_S) -> SlotWriter:
    return SlotWriter(file, weights, lease_s=lease_s)


@contextmanager
def held_by_another_process(file: SlotFile, slot: int, exclusive: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A reader in another process that has taken a lease and never releases it."""
    command = [sys.executable, "-c", HOLD_A_LEASE, str(file.fd), str(slot * MAX_RANKS)]
    command.append("LOCK_EX" if exclusive else "LOCK_SH")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fd], text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
