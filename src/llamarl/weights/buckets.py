"""Packs the moves of a plan between one source and one target into messages of a bounded size.

Wider elements come first, so that everything is aligned without padding. Each bucket begins with its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from llamarl.layout.boxes import Box, relative, shape_of, split_rows, volume
from llamarl.layout.plan import TransferPlan
from llamarl.model.shards import Shard
from llamarl.weights.blocks import DIGEST, digest
from llamarl.weights.memory import copy_tensor
from llamarl.weights.wire import SlotShard


class PackedShard(Struct, frozen=True):
    """A box of a parameter, and its place in a bucket."""

    source_name: str
    target_name: str
    box: Box
    item_bytes: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return volume(self.box) * self.item_bytes

    def view(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        return payload[self.offset : self.offset + self.num_bytes].view(dtype).view(shape_of(self.box))


class Bucket(Struct, frozen=True):
    """One message: its digest, then its shards."""

    shards: tuple[PackedShard, ...]

    @property
    def num_bytes(self) -> int:
        return DIGEST + sum(shard.num_bytes for shard in self.shards)


class Route(NamedTuple):
    source: int
    target: int


def buckets_of(plan: TransferPlan, bucket_bytes: int) -> dict[Route, list[Bucket]]:
    """Both ends of a route compute the same buckets, in the order in which they are sent."""
    routes: dict[Route, list[tuple[int, str, str, Box]]] = {}
    for resharding, moves in zip(plan.reshardings, plan.moves, strict=True):
        for source_name, target_name in resharding.names:
            for move in moves:
                boxes = split_rows(move.box, -(-volume(move.box) * resharding.item_bytes // bucket_bytes) or 1)
                found = routes.setdefault(Route(move.source, move.target), [])
                found.extend((resharding.item_bytes, source_name, target_name, box) for box in boxes)
    return {route: list(_packed(sorted(found, key=lambda p: -p[0]), bucket_bytes)) for route, found in routes.items()}


def _packed(boxes: Iterable[tuple[int, str, str, Box]], bucket_bytes: int) -> Iterable[Bucket]:
    shards, end = list[PackedShard](), 0
    for item_bytes, source_name, target_name, box in boxes:
        size = volume(box) * item_bytes
        if shards and end + size > bucket_bytes:
            yield Bucket(tuple(shards))
            shards, end = [], 0
        shards.append(PackedShard(source_name, target_name, box, item_bytes, end))
        end += size
    if shards:
        yield Bucket(tuple(shards))


Copies = Sequence[tuple[Tensor, Tensor]]  # target and source


def copies_in(bucket: Bucket, slot_shards: Mapping[str, SlotShard], slot: Tensor, message: Tensor) -> Copies:
    """Copies from a slot into a message."""
    copies = []
    for packed in bucket.shards:
        source = slot_shards[packed.source_name]
        view = source.view(slot)[relative(packed.box, source.box)]
        copies.append((packed.view(message[DIGEST:], view.dtype), view))
    return copies


def copies_out(bucket: Bucket, shards: Mapping[str, Shard], message: Tensor) -> Copies:
    """Copies from a message into a reader's tensors."""
    copies = []
    for packed in bucket.shards:
        shard = shards[packed.target_name]
        target = shard.tensor[relative(packed.box, shard.box)]
        copies.append((target, packed.view(message[DIGEST:], target.dtype)))
    return copies


def pack(copies: Copies, message: Tensor) -> None:
    for target, source in copies:
        copy_tensor(target, source)
    message[:DIGEST].copy_(_as_tensor(digest_of(message[DIGEST:])))


def is_sound(message: Tensor) -> bool:
    return bytes(message[:DIGEST].cpu().numpy().tobytes()) == digest_of(message[DIGEST:])


def digest_of(data: Tensor) -> bytes:
    if data.is_cpu:
        return digest(data.numpy())
    from llamarl.weights.kernels import sums_of

    words = len(data) // 4 * 4
    summed = sums_of(data[:words]).cpu().numpy().tobytes() + data[words:].cpu().numpy().tobytes()
    return hashlib.blake2b(summed, digest_size=DIGEST).digest()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
