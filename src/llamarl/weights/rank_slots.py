"""The slots of one rank that publishes: how its writer makes them, and how readers find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import torch

from llamarl.weights.memory import HOST, HostMemory, Region, SlotManifest, SlotMemory, picked
from llamarl.weights.slot_file import NUM_SLOTS, Header, RankRecord, SlotFile

_decode_manifest = msgspec.msgpack.Decoder(SlotManifest).decode


class RankSlots:
    """Both slots of one rank, with their digests. `device` is where the caller computes; slots may be on another device."""

    def __init__(self, file: SlotFile, record: RankRecord, manifest: SlotManifest, encoded: bytes, device: int) -> None:
        self.manifest, self.encoded, self.record = manifest, encoded, record
        kind = _memory_kind(manifest)
        self._region = Region.of(manifest, encoded, kind.block_bytes, kind.digest_bytes)
        self._map = file.map(record.offset, self._region.num_bytes)
        self.memory: SlotMemory
        if manifest.device == HOST:
            self.memory = HostMemory(self._map, self._region.slots_at, manifest.num_bytes)
        else:
            from llamarl.weights.cuda_slots import CudaMemory

            self.memory = CudaMemory.find(file, record.memory, manifest, device)

    def write_digests(self, slot: int, digests: bytes) -> None:
        start = self._region.digests_at(slot)
        self._map[start : start + len(digests)] = digests

    def read_digests(self, slot: int) -> bytes:
        start = self._region.digests_at(slot)
        return self._map[start : start + self._region.digest_bytes]

    def picked(self, digests: bytes, blocks: Sequence[int]) -> bytes:
        """The digests of these blocks, out of those of all blocks."""
        return picked(digests, blocks, self.memory.digest_bytes)


def find(file: SlotFile, rank: int, device: int) -> RankSlots:
    record = file.read_rank(rank)
    encoded = read_manifest(file, record)
    return RankSlots(file, record, _decode_manifest(encoded), encoded, device)


def read_manifest(file: SlotFile, record: RankRecord) -> bytes:
    return file.read_at(record.offset, record.manifest_bytes)


def settle(
    file: SlotFile, rank: int, num_ranks: int, manifest: SlotManifest, lease_s: float, on_stuck: Callable[[int], None]
) -> RankSlots:
    """Makes the slots of a writer. A restarted rank takes over its old slots, with their content, if they fit."""
    encoded, known = msgspec.msgpack.encode(manifest), file.read_rank(rank)
    if known.num_ranks == num_ranks and read_manifest(file, known) == encoded:
        return find(file, rank, manifest.device)
    with ExitStack() as stack:
        for slot in range(NUM_SLOTS if known.num_ranks else 0):  # without old slots there are no readers
            stack.enter_context(file.exclusive(slot, rank, lease_s, on_stuck))
            file.write_header(slot, rank, Header())
        kind = _memory_kind(manifest)
        region = Region.of(manifest, encoded, kind.block_bytes, kind.digest_bytes)
        offset = file.reserve(rank, region.num_bytes)
        file.write_at(offset, encoded)
        memory = _new_device_memory(file, rank, manifest)
        file.write_rank(rank, RankRecord(num_ranks, offset, region.num_bytes, len(encoded), memory))
    return find(file, rank, manifest.device)


def _memory_kind(manifest: SlotManifest) -> type[SlotMemory]:
    if manifest.device == HOST:
        return HostMemory
    from llamarl.weights.cuda_slots import CudaMemory

    return CudaMemory


def _new_device_memory(file: SlotFile, rank: int, manifest: SlotManifest) -> int:
    """Number of the new memory; 0 for slots in the file itself."""
    if manifest.device == HOST:
        return 0
    from llamarl.weights.cuda_slots import CudaMemory

    return CudaMemory.create(file, rank, manifest)


def device_of(tensors: Sequence[torch.Tensor]) -> int:
    """Index of the CUDA device that a rank computes on, or HOST."""
    found = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    return found.pop() if found else HOST
