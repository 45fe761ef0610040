"""Random layouts for tests: meshes, and parameters over two of them, sharded evenly, unevenly, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from llamarl.layout.boxes import Box, relative, whole
from llamarl.layout.mesh import AXES, Cut, Mesh, Placement, box_on
from llamarl.model.shards import Shard

Sizes = tuple[int, ...]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ends:
    """Parameters by name, and the shards of them that each end holds."""

    shapes: dict[str, Sizes]
    sources: list[dict[str, Box]]
    targets: list[dict[str, Box]]


@st.composite
def meshes(draw: st.DrawFn, max_ranks: int) -> Mesh:
    axes, left = [], max_ranks
    for axis in AXES:
        size = draw(st.integers(1, min(left, 4)))
        left //= size
        axes.append((axis, size))
    return Mesh(tuple(axes))


@st.composite
def placements(draw: st.DrawFn, dims: int) -> Placement:
    """Random placements: any axis may shard any dimension, and a dimension may be sharded twice."""
    if not dims:
        return ()
    axes = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=3))
    return tuple(Cut(axis, draw(st.integers(0, dims - 1)), draw(st.integers(1, 3))) for axis in axes)


@st.composite
def ends(draw: st.DrawFn, max_ranks: int = 16, max_size: int = 11) -> Ends:
    sizes = st.lists(st.integers(1, max_size), max_size=3).map(tuple)
    shapes = {f"p{index}": size for index, size in enumerate(draw(st.lists(sizes, min_size=1, max_size=4)))}
    sides = []
    for _ in range(2):
        mesh = draw(meshes(max_ranks))
        placed = {name: draw(placements(len(size))) for name, size in shapes.items()}
        sides.append(held_by(mesh, shapes, placed))
    return Ends(shapes, *sides)


def held_by(mesh: Mesh, shapes: dict[str, Sizes], placed: dict[str, Placement]) -> list[dict[str, Box]]:
    return [
        {name: box_on(rank, size, placed[name], mesh) for name, size in shapes.items()}
        for rank in range(mesh.num_ranks)
    ]


def random_tensors(shapes: dict[str, Sizes], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in shapes.items()}


def part(full: Tensor, box: Box) -> Tensor:
    return full[relative(box, whole(full.shape))]


def held(full: dict[str, Tensor], boxes: dict[str, Box], device: torch.device = CPU) -> dict[str, Shard]:
    """What a rank gives to a writer: copies of its shards."""
    return {name: Shard(part(full[name], box).clone().to(device), box) for name, box in boxes.items()}


def empty(full: dict[str, Tensor], boxes: dict[str, Box], device: torch.device = CPU) -> dict[str, Shard]:
    """What a rank gives to a reader: tensors of the right sizes that hold something else."""
    return {name: Shard(torch.full_like(part(full[name], box), 9.0).to(device), box) for name, box in boxes.items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_bits(one), _bits(other)) and one.dtype == other.dtype


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
