"""Ranks in a mesh, and how parameters are laid out over it.

A placement is a list of cuts, each along one axis of the mesh; along axes that no cut names, ranks hold the same. Cuts are
made in order, so FSDP after tensor parallelism cuts what tensor parallelism has left, as torch's FSDP2 does.
"""

from __future__ import annotations

from math import prod

from msgspec import Struct

from llamarl.errors import InputError
from llamarl.layout.boxes import Box, chunk, whole

AXES = ("replicas", "fsdp", "tp")  # outermost first: neighbors in `tp` are neighbors on a host
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


class Mesh(Struct, frozen=True):
    """`Mesh((("fsdp", 4), ("tp", 2)))`: eight ranks, of which 0 and 1 differ in `tp`."""

    axes: tuple[tuple[str, int], ...] = ()

    @property
    def num_ranks(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int, axis: str) -> int:
        for name, size in reversed(self.axes):
            if name == axis:
                return rank % size
            rank //= size
        return 0


class Cut(Struct, frozen=True):
    """Along `axis` of the mesh, dimension `dim` of the parameter is dealt out in whole units."""

    axis: str
    dim: int
    unit: int = 1


Placement = tuple[Cut, ...]


def box_on(rank: int, shape: tuple[int, ...], placement: Placement, mesh: Mesh) -> Box:
    box = list(whole(shape))
    for cut in placement:
        first, end = box[cut.dim]
        box[cut.dim] = chunk(first, end, mesh.size(cut.axis), mesh.coordinate(rank, cut.axis), cut.unit)
    return tuple(box)


class Side(Struct, frozen=True):
    """One end of a transfer, as the command line names it: 'tp=8,replicas=64,precision=fp8'."""

    mesh: Mesh
    precision: str


def parse_side(option: str, text: str, precision: str) -> Side:
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key == "precision" and value in PRECISIONS:
            precision = value
        elif key in AXES and key not in sizes and value.isascii() and value.isdigit() and 0 < int(value) <= 1 << 20:
            sizes[key] = int(value)
        else:
            raise InputError(
                f"{option}: cannot read '{part}'; write {', '.join(f'{axis}=N' for axis in AXES)} or "
                f"precision={'|'.join(PRECISIONS)}, each once, with commas in between"
            )
    return Side(Mesh(tuple((axis, sizes[axis]) for axis in AXES if axis in sizes)), precision)
