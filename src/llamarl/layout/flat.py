"""Places tensors one after the other in a flat buffer.

The offsets follow from the list of tensors, so a publication carries bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from msgspec import Struct

ALIGNMENT = 64  # bytes; every parameter starts on a cache line, so that views of any dtype are aligned

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class TensorSpec(Struct, frozen=True):
    """Name, shape and type of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Placed(Struct, frozen=True):
    """A tensor and the offset of its first byte."""

    spec: TensorSpec
    offset: int


class FlatLayout(Struct, frozen=True):
    """Tensors in their order, and the bytes of all of them with padding."""

    tensors: tuple[Placed, ...]
    num_bytes: int


def flat_layout(specs: Iterable[TensorSpec]) -> FlatLayout:
    placed, end = [], 0
    for spec in specs:
        placed.append(Placed(spec, end))
        end += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return FlatLayout(tuple(placed), end)
