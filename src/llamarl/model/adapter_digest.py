"""A hash of adapters that does not depend on how ranks share them: the sum of a hash of every number at its place.

The trainer hashes what it publishes, and the generator what its products read, with the factor that they multiply by. Equal
hashes mean the same matrices, in the same layers and places, with the same factor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.layout.boxes import Box

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed number
_BITS = {2: torch.int16, 4: torch.int32}


class HashedPart(NamedTuple):
    """A rank's part of an adapter: the box of it that the rank holds, of so many columns in all, and the factor that it is
    applied with."""

    name: str
    tensor: Tensor
    box: Box
    columns: int
    scale: float


@torch.no_grad()
def hash_parts(parts: Iterable[HashedPart], device: torch.device | str) -> Tensor:
    """Sum of the hashes of these parts, one number of 64 bits; those of all ranks are to be added up."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        numbers = part.tensor.contiguous().view(_BITS[part.tensor.dtype.itemsize]).long()
        total += (numbers * _places(part.box, part.columns, part.tensor.device)).sum() * _factor(part.name, part.scale)
    return total


@lru_cache(maxsize=64)
def _places(box: Box, columns: int, device: torch.device) -> Tensor:
    """An odd number for every place of a matrix, in the box."""
    (first_row, end_row), (first, end) = box
    rows = torch.arange(first_row, end_row, device=device)[:, None]
    return ((rows * columns + torch.arange(first, end, device=device)) * _MIX) * 2 + 1


def _factor(name: str, scale: float) -> int:
    digest = hashlib.blake2b(f"{name}/{scale!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True) | 1


def hash_text(total: Tensor) -> str:
    return f"{int(total.item()) & ((1 << 64) - 1):016x}"
