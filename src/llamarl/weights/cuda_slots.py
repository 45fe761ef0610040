"""Slots in device memory, shared by the processes of one host. Weights are copied, cast and summed in one pass over memory;
only the sums reach the host."""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from llamarl.weights import fd_mailbox
from llamarl.weights.cuda_driver import Mapping, allocate
from llamarl.weights.kernels import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    CopyRun,
    RowTable,
    fits_rows,
    launch,
    quantize_rows,
    row_addresses,
    tiles,
)
from llamarl.weights.memory import ShardRead, SlotManifest, picked
from llamarl.weights.slot_file import NUM_SLOTS, SlotFile
from llamarl.weights.wire import LEAST_SCALE, MAX_FP8, Quantized, SlotShard, Staging

_ALIGNED = 16  # bytes that the kernels read at once


class CudaMemory:
    """Slots in device memory. `user` is the device that copies and sums; the memory may be on another one."""

    block_bytes, digest_bytes = BLOCK_BYTES, 8

    def __init__(self, both: Tensor, num_bytes: int, user: int, owner: Mapping | None = None) -> None:
        self._bytes, self._num_bytes, self._owner = both, num_bytes, owner
        self._device = torch.device("cuda", user)
        self._sums = torch.zeros(-(-num_bytes // BLOCK_BYTES), dtype=torch.int64, device=self._device)
        self._writes: dict[int, WriteTables] = {}
        self._reads: dict[int, ReadTables] = {}
        self._digested_reads: dict[int, DigestedReadTables] = {}
        self._checks: dict[int, Tensor] = {}

    @classmethod
    def create(cls, file: SlotFile, rank: int, manifest: SlotManifest) -> int:
        """New memory for both slots of a rank, zeroed, since padding is summed too. Returns its number."""
        size, number = NUM_SLOTS * cls._stride(manifest.num_bytes), secrets.randbits(62) | 1
        fd = allocate(manifest.device, size)
        mapping = Mapping(fd, manifest.device, size, [manifest.device])
        mapping.tensor().zero_()
        torch.cuda.synchronize(manifest.device)
        mapping.close()
        fd_mailbox.store(file, rank, number, fd)
        os.close(fd)
        return number

    @classmethod
    def find(cls, file: SlotFile, number: int, manifest: SlotManifest, user: int) -> CudaMemory:
        fd, size = fd_mailbox.find(file, number), NUM_SLOTS * cls._stride(manifest.num_bytes)
        try:
            mapping = Mapping(fd, manifest.device, size, sorted({manifest.device, user}))
        finally:
            os.close(fd)
        return cls(mapping.tensor(), manifest.num_bytes, user, mapping)

    @classmethod
    def private(cls, num_bytes: int, device: int) -> CudaMemory:
        """Slots that no other process sees."""
        both = torch.zeros(NUM_SLOTS * cls._stride(num_bytes), dtype=torch.uint8, device=torch.device("cuda", device))
        return cls(both, num_bytes, device)

    @staticmethod
    def _stride(num_bytes: int) -> int:
        return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def data(self, slot: int) -> Tensor:
        start = slot * self._stride(self._num_bytes)
        return self._bytes[start : start + self._num_bytes]

    def write(self, slot: int, staging: Staging) -> bytes:
        if slot not in self._writes:
            self._writes[slot] = WriteTables(staging, self.data(slot), self._device)
        tables = self._writes[slot]
        with torch.cuda.device(self._device):
            self._sums.zero_()
            tables.fill(self._sums)
            staging.quantize(self.data(slot), tables.quantize_later)
            launch(tables.sum_later, self._sums, copy=False, add=True)
            return self._taken_sums()

    def digests(self, slot: int, blocks: Sequence[int]) -> bytes:
        """Sums of these blocks. A reader always asks for the same blocks, so their table is made once."""
        if slot not in self._checks:
            self._checks[slot] = self._check_table(slot, blocks)
        with torch.cuda.device(self._device):
            self._sums.zero_()
            launch(self._checks[slot], self._sums, copy=False, add=True)
            return picked(self._taken_sums(), blocks, self.digest_bytes)

    def read(self, slot: int, reads: Sequence[ShardRead]) -> None:
        if slot not in self._reads:
            self._reads[slot] = ReadTables(reads, self.data(slot), self._device)
        with torch.cuda.device(self._device):
            self._reads[slot].fill(self._sums)
            torch.cuda.current_stream().synchronize()  # the lease ends when this returns

    def read_digested(self, slot: int, reads: Sequence[ShardRead], blocks: Sequence[int]) -> bytes:
        if slot not in self._digested_reads:
            self._digested_reads[slot] = DigestedReadTables(reads, blocks, self.data(slot), self._device)
        with torch.cuda.device(self._device):
            self._sums.zero_()
            self._digested_reads[slot].fill(self._sums)
            return picked(self._taken_sums(), blocks, self.digest_bytes)

    def _check_table(self, slot: int, blocks: Sequence[int]) -> Tensor:
        return tiles(_unread(self.data(slot), blocks, [])).to(self._device)

    def _taken_sums(self) -> bytes:
        """The sums, after waiting for the device and so for all copies."""
        return bytes(self._sums.cpu().numpy().tobytes())


class WriteTables:
    """How a rank's shards go into one slot: as they are, narrowed from fp32 to bf16, or by torch and summed afterwards."""

    def __init__(self, staging: Staging, data: Tensor, device: torch.device) -> None:
        raw, narrow, later = list[CopyRun](), list[CopyRun](), list[CopyRun]()
        self._others: list[tuple[Tensor, Tensor]] = []
        for target, tensor in staging.copied:
            view, run = target.view(data), _run(target, data, tensor)
            if not _fits(tensor, view):
                self._others.append((view, tensor))
                later.append(run)
            elif tensor.dtype == view.dtype:
                raw.append(run)
            elif (tensor.dtype, view.dtype) == (torch.float32, torch.bfloat16):
                narrow.append(run)
            else:
                self._others.append((view, tensor))
                later.append(run)
        later += [_run(shard, data) for one in staging.quantized for shard in (one.target, one.scale)]
        self._raw, self._narrow = tiles(raw).to(device), tiles(narrow, source_word_bytes=8).to(device)
        self._rows, self.quantize_later = _row_tables(staging, data, device)
        self.sum_later = tiles(run._replace(source=run.target) for run in later).to(device)

    def fill(self, sums: Tensor) -> None:
        launch(self._raw, sums, copy=True, add=True)
        launch(self._narrow, sums, copy=True, add=True, narrow=True)
        for table in self._rows:
            quantize_rows(table, MAX_FP8, LEAST_SCALE)
        for view, tensor in self._others:
            view.copy_(tensor)


def _row_tables(staging: Staging, data: Tensor, device: torch.device) -> tuple[list[RowTable], list[Quantized]]:
    """Tables of rows that the kernel quantizes in few launches, and the shards that are left to torch."""
    alike: dict[tuple[int, bool], list[Tensor]] = defaultdict(list)
    later: list[Quantized] = []
    for one in staging.quantized:
        weight, (first, end) = one.shard.tensor, one.scale.box[1]
        if staging.shares_rows or end - first != 1 or not weight.is_cuda or not fits_rows(weight):
            later.append(one)
            continue
        addresses = row_addresses(weight, one.target.view(data), one.scale.view(data))
        alike[weight.shape[1], weight.dtype == torch.float32].append(addresses)
    tables = [RowTable(torch.cat(found).to(device), *kind) for kind, found in alike.items()]
    return tables, later


class ReadTables:
    """How the bytes of one slot go into a reader's shards."""

    def __init__(self, reads: Iterable[ShardRead], data: Tensor, device: torch.device) -> None:
        self._runs: list[CopyRun] = []
        self._others: list[tuple[Tensor, Tensor]] = []
        for read in reads:
            first, end = read.byte_range
            if read.is_plain and first % _ALIGNED == 0 and _fits(read.target, read.target):
                self._runs.append(
                    CopyRun(data.data_ptr() + first, read.target.data_ptr(), first // 4, (end - first) // 4)
                )
            else:
                self._others.append((read.target, read.source_in(data)))
        self._raw = tiles(self._runs).to(device)

    def fill(self, sums: Tensor, *, add: bool = False) -> None:
        launch(self._raw, sums, copy=True, add=add)
        for target, source in self._others:
            target.copy_(source)


class DigestedReadTables(ReadTables):
    """Reads that also sum the blocks: copied words on the way, the other words of the blocks separately."""

    def __init__(self, reads: Iterable[ShardRead], blocks: Sequence[int], data: Tensor, device: torch.device) -> None:
        super().__init__(reads, data, device)
        self._rest = tiles(_unread(data, blocks, self._runs)).to(device)

    def fill(self, sums: Tensor, *, add: bool = True) -> None:
        super().fill(sums, add=add)
        launch(self._rest, sums, copy=False, add=True)


def _unread(data: Tensor, blocks: Sequence[int], runs: Sequence[CopyRun]) -> list[CopyRun]:
    """Words of these blocks that no run covers. Runs do not overlap."""
    num_words, found = len(data) // 4, list[CopyRun]()
    taken = sorted((run.position, run.position + run.num_words) for run in runs)
    for block in blocks:
        at, end = block * BLOCK_WORDS, min(num_words, (block + 1) * BLOCK_WORDS)
        inside = [(max(at, first), min(end, last)) for first, last in taken if first < end and last > at]
        for first, last in (*inside, (end, end)):
            if first > at:
                found.append(CopyRun(data.data_ptr() + 4 * at, 0, at, first - at))
            at = max(at, last)
    return found


def _fits(tensor: Tensor, view: Tensor) -> bool:
    """Whether the kernels can copy it: on a device, contiguous, aligned to 16 bytes, in whole words."""
    return (
        tensor.is_cuda
        and tensor.is_contiguous()
        and tensor.data_ptr() % _ALIGNED == 0
        and view.numel() * view.itemsize % 4 == 0
    )


def _run(shard: SlotShard, data: Tensor, tensor: Tensor | None = None) -> CopyRun:
    """The words of a shard in the slot, rounded up: the padding behind a shard is zero."""
    view = shard.view(data)
    source = tensor.data_ptr() if tensor is not None else 0
    return CopyRun(source, data.data_ptr() + shard.offset, shard.offset // 4, -(-view.numel() * view.itemsize // 4))
