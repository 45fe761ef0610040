"""Which part of each parameter this rank holds: its own memory, and the box of the whole that it fills."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llamarl.model.transformer import Transformer


@dataclass(frozen=True)
class Part:
    """`tensor` is `whole[box]`; writing into it writes the parameter. A box may be empty: then others hold it all."""

    tensor: Tensor
    box: tuple[slice, ...]
    shape: tuple[int, ...]  # of the whole parameter


def owned_parts(model: Transformer) -> dict[str, Part]:
    """By Hugging Face name. The boxes of all ranks together cover every parameter; ranks that hold the same one (tensor
    ranks, of what tensor parallelism leaves whole) hold the same numbers."""
    return {name: part_of(parameter) for name, parameter in model.named_parameters()}


def part_of(tensor: Tensor) -> Part:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach(), tuple(slice(0, size) for size in shape), shape)
    local, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    box = tuple(slice(start, start + size) for start, size in zip(offset, local, strict=True))
    return Part(tensor.to_local().detach(), box, shape)
