"""A hash of adapters that does not depend on how ranks share them: the sum of a hash of every number at its place.

The trainer hashes what it publishes, and the generator what its products read, with the factor that they multiply by. Equal
hashes mean the same matrices, in the same layers and places, with the same factor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.layout.boxes import Box, flat_index

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed number
_BITS = {2: torch.int16, 4: torch.int32}


class HashedPart(NamedTuple):
    """A rank's part of an adapter: the box of it that the rank holds, the shape of all of it, and the factor that it is
    applied with."""

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]
    scale: float

    def matrices(self) -> Iterator[tuple[Tensor, int]]:
        """The matrices in the box, one for each index of dimensions before the last two, with the number of each one's first
        place in the whole adapter."""
        leading = self.shape[:-2]
        flat = self.tensor.reshape(-1, *self.tensor.shape[-2:]) if leading else self.tensor[None]
        firsts = [first for first, _ in self.box[-2:]]
        for matrix, index in zip(flat, product(*(range(*dim) for dim in self.box[:-2])), strict=True):
            yield matrix, flat_index((*index, *firsts), self.shape)


class AdapterHash:
    """Hashes the parts of one rank, after the changes of type that `types` names: those on the way to a generator. On a GPU
    in one launch, whose table is kept for the next call with the same list."""

    def __init__(self, device: torch.device, types: tuple[torch.dtype, ...] = ()) -> None:
        self._device, self._types = device, types
        self._parts: Sequence[HashedPart] = ()
        self._table: Tensor | None = None

    @torch.no_grad()
    def total(self, parts: Sequence[HashedPart]) -> Tensor:
        """Sum of the hashes of these parts, one number of 64 bits; those of all ranks are to be added up."""
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        if self._device.type == "cuda":
            self._add_on_gpu(total, parts)
            return total
        for part in parts:
            tensor = part.tensor.contiguous()
            for dtype in self._types:
                tensor = tensor.to(dtype)
            numbers = tensor.view(_BITS[tensor.dtype.itemsize]).long()
            total += (numbers * _places(part.box, part.shape)).sum() * _factor(part.name, part.scale)
        return total

    def _add_on_gpu(self, total: Tensor, parts: Sequence[HashedPart]) -> None:
        from llamarl.model.lora_kernels import hash_table, hash_tiles

        if not parts:
            return
        if self._table is None or parts is not self._parts:
            assert all(part.tensor.is_contiguous() for part in parts)
            rows = [
                (matrix, place, one.shape[-1], _factor(one.name, one.scale))
                for one in parts
                for matrix, place in one.matrices()
            ]
            self._parts, self._table = parts, hash_table(rows, self._device)
        held = parts[0].tensor.dtype
        wire, applied = self._types or (held, held)
        hash_tiles(total, self._table, _MIX, held, wire, applied)


@lru_cache(maxsize=64)
def _places(box: Box, shape: tuple[int, ...]) -> Tensor:
    """An odd number for every place of an adapter, in the box."""
    numbers = torch.zeros((), dtype=torch.int64)
    for (first, end), size in zip(box, shape, strict=True):
        numbers = numbers[..., None] * size + torch.arange(first, end)
    return (numbers * _MIX) * 2 + 1


@lru_cache(maxsize=4096)
def _factor(name: str, scale: float) -> int:
    digest = hashlib.blake2b(f"{name}/{scale!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True) | 1


class PendingHash:
    """A hash on its way to the host: what is asked of the device afterwards does not wait for it, nor it for that."""

    def __init__(self, total: Tensor) -> None:
        self._total, self._arrived = total, None
        if total.is_cuda:
            self._total = torch.empty((), dtype=total.dtype, pin_memory=True).copy_(total, non_blocking=True)
            self._arrived = torch.cuda.current_stream(total.device).record_event()

    def text(self) -> str:
        if self._arrived is not None:
            self._arrived.synchronize()
        return hash_text(self._total)


def hash_text(total: Tensor) -> str:
    return f"{int(total.item()) & ((1 << 64) - 1):016x}"
