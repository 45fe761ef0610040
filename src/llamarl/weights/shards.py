"""What one rank holds of a model: by name, a tensor and the box of the whole parameter that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from llamarl.errors import InputError
from llamarl.layout.boxes import Box, shape_of, whole


class Shard(NamedTuple):
    tensor: Tensor
    box: Box


# A tensor alone is a whole parameter; with slices it is what `full[slices]` would be.
Parameters = Mapping[str, Tensor | tuple[Tensor, Sequence[slice]]]


def shards_of(parameters: Parameters) -> dict[str, Shard]:
    return {name: _shard(name, held) for name, held in parameters.items()}


def _shard(name: str, held: Tensor | tuple[Tensor, Sequence[slice]]) -> Shard:
    if isinstance(held, Tensor):
        return Shard(held.detach(), whole(held.shape))
    tensor, slices = held[0].detach(), held[1]
    firsts = [part.start or 0 for part in slices]
    ends = [
        first + size if part.stop is None else part.stop
        for first, part, size in zip(firsts, slices, tensor.shape, strict=False)
    ]
    box: Box = tuple(zip(firsts, ends, strict=False))
    if len(slices) != tensor.dim() or shape_of(box) != tuple(tensor.shape):
        raise InputError(f"weights: '{name}' is held as {list(tensor.shape)}, but its slices say {list(shape_of(box))}")
    return Shard(tensor, box)
