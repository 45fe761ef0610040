"""Where slots keep their bytes. Every kind of memory is cut into blocks, and each block has a digest of its own, so that a
reader verifies what it takes and nothing else."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from llamarl.layout.boxes import Box, relative, shape_of, volume
from llamarl.weights.blocks import (
    BLOCK,
    DIGEST,
    Bytes,
    Cut,
    Part,
    copy_in,
    copy_out,
    copy_out_digested,
    cut_by_block,
    digests_of,
    for_each,
)
from llamarl.weights.slot_file import NUM_SLOTS, PAGE
from llamarl.weights.wire import SlotShard, Staging

HOST = -1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SERIAL = 1 << 14  # elements; torch works on so few without other threads


class SlotManifest(Struct, frozen=True):
    """What lies in the slots of one rank, the same in both, and where: in host memory, or on a CUDA device."""

    entries: tuple[SlotShard, ...]
    num_bytes: int
    device: int = HOST


class ShardRead(NamedTuple):
    """A part of one entry, and the part of a reader's tensor that it fills."""

    entry: SlotShard
    box: Box
    target: Tensor

    @property
    def inside(self) -> tuple[slice, ...]:
        return relative(self.box, self.entry.box)

    def source(self, data: Tensor) -> Tensor:
        return self.entry.view(data)[self.inside]

    @property
    def num_bytes(self) -> int:
        return volume(self.box) * self.entry.holding.item_bytes

    @property
    def is_plain(self) -> bool:
        """Contiguous at both ends and of one type: bytes can go as they are."""
        same_type = str(self.target.dtype).removeprefix("torch.") == self.entry.dtype
        return same_type and self.target.is_contiguous() and is_contiguous(self.box, self.entry.box)

    @property
    def byte_range(self) -> tuple[int, int]:
        """From its first byte in the slot to behind its last; what lies in between need not all belong to it."""
        first, last, stride = 0, 0, 1
        for part, size in zip(reversed(self.inside), reversed(shape_of(self.entry.box)), strict=True):
            first, last, stride = first + part.start * stride, last + (part.stop - 1) * stride, stride * size
        width = self.entry.holding.item_bytes
        return self.entry.offset + first * width, self.entry.offset + (last + 1) * width


def is_contiguous(box: Box, frame: Box) -> bool:
    """Whether a box is one run of the memory that holds its frame."""
    partial = False
    for size, full in zip(reversed(shape_of(box)), reversed(shape_of(frame)), strict=True):
        if partial and size != 1:
            return False
        partial = partial or size != full
    return True


def blocks_of(pieces: Iterable[ShardRead], block_bytes: int) -> list[int]:
    ranges = (piece.byte_range for piece in pieces)
    return sorted({block for first, end in ranges for block in range(first // block_bytes, -(-end // block_bytes))})


class SlotMemory(Protocol):
    block_bytes: int
    digest_bytes: int

    def data(self, slot: int) -> Tensor:
        """All bytes of a slot."""

    def write(self, slot: int, staging: Staging) -> bytes:
        """Fill a slot; returns the digest of every block."""

    def digests(self, slot: int, blocks: Sequence[int]) -> bytes:
        """The digests of these blocks, as they are now."""

    def read(self, slot: int, pieces: Sequence[ShardRead]) -> None:
        """Fill the targets."""

    def take(self, slot: int, pieces: Sequence[ShardRead], blocks: Sequence[int]) -> bytes:
        """Both in one pass: fill the targets, and return the digests of the blocks that they lie in."""


class Copies(NamedTuple):
    """What goes between a slot and tensors: bytes as they are, by block, and pairs (target, source) of tensors."""

    plain: Cut
    others: Sequence[tuple[Tensor, Tensor]]

    def copy_others(self) -> None:
        for_each(range(len(self.others)), lambda index: copy_tensor(*self.others[index]), torch.get_num_threads())


class HostMemory:
    """Slots in the slot file itself. Its writer always writes the same tensors, and its reader always takes the same pieces,
    so what is to be copied is worked out once for each slot."""

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

    def read(self, slot: int, pieces: Sequence[ShardRead]) -> None:
        copies = self._copies_out(slot, pieces)
        copies.copy_others()
        copy_out(self.data(slot).numpy(), copies.plain, torch.get_num_threads())

    def take(self, slot: int, pieces: Sequence[ShardRead], blocks: Sequence[int]) -> bytes:
        copies = self._copies_out(slot, pieces)
        copies.copy_others()
        return copy_out_digested(self.data(slot).numpy(), copies.plain, blocks, torch.get_num_threads())

    def _copies_out(self, slot: int, pieces: Sequence[ShardRead]) -> Copies:
        if slot not in self._reads:
            self._reads[slot] = _copies_out(pieces, self.data(slot))
        return self._reads[slot]


def _copies_in(staging: Staging, data: Tensor) -> Copies:
    plain, others = list[Part](), list[tuple[Tensor, Tensor]]()
    for entry, tensor in staging.copied:
        view = entry.view(data)
        if tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == view.dtype:
            plain.append((entry.offset, _bytes_of(tensor)))
        else:
            others.append((view, tensor))
    return Copies(cut_by_block(plain), others)


def _copies_out(pieces: Sequence[ShardRead], data: Tensor) -> Copies:
    plain, others = list[Part](), list[tuple[Tensor, Tensor]]()
    for piece in pieces:
        if piece.target.is_cpu and piece.is_plain:
            plain.append((piece.byte_range[0], _bytes_of(piece.target)))
        else:
            others.append((piece.target, piece.source(data)))
    return Copies(cut_by_block(plain), others)


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """As torch's copy_, but on a CPU by this thread alone: torch's own would have to meet after every tensor, which on shared
    cores costs more than the copy."""
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
