"""A shard: the part of a parameter that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from llamarl.errors import InputError
from llamarl.layout.boxes import Box, shape_of, whole


class Shard(NamedTuple):
    """A rank's own memory of a parameter, and the box of the whole parameter that it fills."""

    tensor: Tensor
    box: Box


Parameters = Mapping[str, Tensor | Shard]  # a tensor alone is a whole parameter


def shards_of(parameters: Parameters) -> dict[str, Shard]:
    """Maps each parameter name to its shard. InputError where a tensor does not have the size of its box."""
    return {name: _checked(name, held) for name, held in parameters.items()}


def _checked(name: str, held: Tensor | Shard) -> Shard:
    if isinstance(held, Tensor):
        return Shard(held.detach(), whole(held.shape))
    if shape_of(held.box) != tuple(held.tensor.shape):
        raise InputError(
            f"weights: '{name}' is held as {list(held.tensor.shape)}, but its box says {list(shape_of(held.box))}"
        )
    return Shard(held.tensor.detach(), held.box)
