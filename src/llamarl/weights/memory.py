"""Where slots keep their bytes. Every kind of memory is cut into blocks, and each block has its own digest, so that a reader
verifies only the blocks that it reads."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from llamarl.layout.boxes import Box, relative, shape_of, volume
from llamarl.weights.blocks import (
    BLOCK,
    DIGEST,
    ByteRun,
    Bytes,
    RunsByBlock,
    copy_in,
    copy_out,
    copy_out_digested,
    digests_of,
    for_each,
    runs_by_block,
)
from llamarl.weights.slot_file import NUM_SLOTS, PAGE
from llamarl.weights.wire import SlotShard, Staging

HOST = -1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SERIAL = 1 << 14  # elements; torch copies so few by one thread


class SlotManifest(Struct, frozen=True):
    """What the slots of one rank hold, and where: in host memory, or on a CUDA device. Both slots have the same layout."""

    shards: tuple[SlotShard, ...]
    num_bytes: int
    device: int = HOST


def picked(digests: bytes, blocks: Sequence[int], digest_bytes: int) -> bytes:
    """The digests of these blocks, in ascending order, out of those of all blocks."""
    if len(blocks) * digest_bytes == len(digests):
        return digests
    return b"".join(digests[block * digest_bytes : (block + 1) * digest_bytes] for block in blocks)


class ShardRead(NamedTuple):
    """A read of one box: the slot shard that it is in, and the part of a reader's tensor that it fills."""

    source: SlotShard
    box: Box
    target: Tensor

    @property
    def inside(self) -> tuple[slice, ...]:
        return relative(self.box, self.source.box)

    def source_in(self, data: Tensor) -> Tensor:
        """View of the bytes to read, in a slot's data."""
        return self.source.view(data)[self.inside]

    @property
    def num_bytes(self) -> int:
        return volume(self.box) * self.source.spec.item_bytes

    @property
    def is_plain(self) -> bool:
        """Whether it is contiguous and of the same type at both ends, so that its bytes are copied as they are."""
        same_type = str(self.target.dtype).removeprefix("torch.") == self.source.dtype
        return same_type and self.target.is_contiguous() and is_contiguous(self.box, self.source.box)

    @property
    def byte_range(self) -> tuple[int, int]:
        """Offsets of its first byte in the slot and of the end of its last. Bytes in between may belong to other reads."""
        first, last, stride = 0, 0, 1
        for rows, size in zip(reversed(self.inside), reversed(shape_of(self.source.box)), strict=True):
            first, last, stride = first + rows.start * stride, last + (rows.stop - 1) * stride, stride * size
        width = self.source.spec.item_bytes
        return self.source.offset + first * width, self.source.offset + (last + 1) * width


def is_contiguous(box: Box, frame: Box) -> bool:
    """Whether a box is one contiguous run of the memory that holds its frame."""
    partial = False
    for size, full in zip(reversed(shape_of(box)), reversed(shape_of(frame)), strict=True):
        if partial and size != 1:
            return False
        partial = partial or size != full
    return True


def blocks_of(reads: Iterable[ShardRead], block_bytes: int) -> list[int]:
    """Blocks that the reads touch."""
    ranges = (read.byte_range for read in reads)
    return sorted({block for first, end in ranges for block in range(first // block_bytes, -(-end // block_bytes))})


class SlotMemory(Protocol):
    """Memory of the two slots of one rank."""

    block_bytes: int
    digest_bytes: int

    def data(self, slot: int) -> Tensor:
        """All bytes of a slot."""

    def write(self, slot: int, staging: Staging) -> bytes:
        """Fills a slot; returns the digest of every block."""

    def digests(self, slot: int, blocks: Sequence[int]) -> bytes:
        """Digests of these blocks, computed from their current bytes."""

    def read(self, slot: int, reads: Sequence[ShardRead]) -> None:
        """Fills the targets."""

    def read_digested(self, slot: int, reads: Sequence[ShardRead], blocks: Sequence[int]) -> bytes:
        """Fills the targets and returns the digests of the blocks that they lie in, in one pass over memory."""


class Copies(NamedTuple):
    """Copies between a slot and tensors: bytes as they are, by block, and other pairs (target, source) of tensors."""

    plain: RunsByBlock
    others: Sequence[tuple[Tensor, Tensor]]

    def copy_others(self) -> None:
        for_each(range(len(self.others)), lambda index: copy_tensor(*self.others[index]), torch.get_num_threads())


class HostMemory:
    """Slots in the slot file itself. A writer always writes the same tensors and a reader always makes the same reads, so the
    copies are worked out once for each slot."""

    block_bytes, digest_bytes = BLOCK, DIGEST

    def __init__(self, region: mmap.mmap, start: int, num_bytes: int) -> None:
        self._region, self._start, self._num_bytes = region, start, num_bytes
        self._writes: dict[int, Copies] = {}
        self._reads: dict[int, Copies] = {}

    def data(self, slot: int) -> Tensor:
        start = self._start + slot * padded(self._num_bytes)
        if not self._num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(memoryview(self._region)[start : start + self._num_bytes], dtype=torch.uint8)

    def write(self, slot: int, staging: Staging) -> bytes:
        data = self.data(slot)
        if slot not in self._writes:
            self._writes[slot] = _copies_in(staging, data)
        self._writes[slot].copy_others()
        staging.quantize(data)
        return copy_in(data.numpy(), self._writes[slot].plain, torch.get_num_threads())

    def digests(self, slot: int, blocks: Sequence[int]) -> bytes:
        return digests_of(self.data(slot).numpy(), blocks, torch.get_num_threads())

    def read(self, slot: int, reads: Sequence[ShardRead]) -> None:
        copies = self._copies_out(slot, reads)
        copies.copy_others()
        copy_out(self.data(slot).numpy(), copies.plain, torch.get_num_threads())

    def read_digested(self, slot: int, reads: Sequence[ShardRead], blocks: Sequence[int]) -> bytes:
        copies = self._copies_out(slot, reads)
        copies.copy_others()
        return copy_out_digested(self.data(slot).numpy(), copies.plain, blocks, torch.get_num_threads())

    def _copies_out(self, slot: int, reads: Sequence[ShardRead]) -> Copies:
        if slot not in self._reads:
            self._reads[slot] = _copies_out(reads, self.data(slot))
        return self._reads[slot]


def _copies_in(staging: Staging, data: Tensor) -> Copies:
    plain, others = list[ByteRun](), list[tuple[Tensor, Tensor]]()
    for target, tensor in staging.copied:
        view = target.view(data)
        if tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == view.dtype:
            plain.append((target.offset, _bytes_of(tensor)))
        else:
            others.append((view, tensor))
    return Copies(runs_by_block(plain), others)


def _copies_out(reads: Sequence[ShardRead], data: Tensor) -> Copies:
    plain, others = list[ByteRun](), list[tuple[Tensor, Tensor]]()
    for read in reads:
        if read.target.is_cpu and read.is_plain:
            plain.append((read.byte_range[0], _bytes_of(read.target)))
        else:
            others.append((read.target, read.source_in(data)))
    return Copies(runs_by_block(plain), others)


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Copies as torch's copy_ does, but on a CPU by this thread alone: torch's threads would wait for each other after every
    tensor, which on shared cores costs more than the copy."""
    if not (target.is_cpu and source.is_cpu):
        target.copy_(source)
    elif target.dtype == source.dtype:
        bits = _BITS[target.dtype.itemsize]
        np.copyto(target.view(bits).numpy(), source.view(bits).numpy())
    elif target.is_contiguous() and source.is_contiguous():
        steps = (torch.split(tensor.view(-1), _SERIAL) for tensor in (target, source))
        for one, other in zip(*steps, strict=True):
            one.copy_(other)
    else:
        target.copy_(source)


def _bytes_of(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return found


def on_own_stream(device: int) -> AbstractContextManager[object]:
    """A stream for this thread alone: what waits there for a dead peer holds up nothing else on the GPU."""
    return nullcontext() if device == HOST else torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def padded(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


class Region(NamedTuple):
    """How one rank's region of the slot file is divided: manifest, digests of both slots, and host slots if it has any."""

    manifest_bytes: int
    digest_bytes: int  # of one slot
    slot_bytes: int  # 0: the slots live on a device

    @classmethod
    def of(cls, manifest: SlotManifest, encoded: bytes, block_bytes: int, digest_bytes: int) -> Region:
        blocks = -(-manifest.num_bytes // block_bytes)
        return cls(len(encoded), blocks * digest_bytes, manifest.num_bytes if manifest.device == HOST else 0)

    def digests_at(self, slot: int) -> int:
        return padded(self.manifest_bytes) + slot * padded(self.digest_bytes)

    @property
    def slots_at(self) -> int:
        return self.digests_at(NUM_SLOTS)

    @property
    def num_bytes(self) -> int:
        return self.slots_at + NUM_SLOTS * padded(self.slot_bytes)
