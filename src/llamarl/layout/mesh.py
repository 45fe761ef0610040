"""Meshes of ranks, and how parameters are laid out over them.

A placement is a list of cuts, each along one axis of the mesh. Along other axes, ranks hold equal shards. Cuts are made in
order: FSDP after tensor parallelism cuts the shards of tensor parallelism, as torch's FSDP2 does.
"""

from __future__ import annotations

from math import prod

from msgspec import Struct

from llamarl.errors import InputError
from llamarl.layout.boxes import Box, chunk, whole

AXES = ("replicas", "fsdp", "tp")  # outermost first: neighbors in `tp` are neighbors on a host
EXPERT_AXES = ("ep", "etp")  # of the ranks along `tp`: who holds different experts, and different parts of each
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


class Mesh(Struct, frozen=True):
    """Axes and their sizes, outermost first. `Mesh((("fsdp", 4), ("tp", 2)))` has eight ranks; 0 and 1 differ in `tp`. The
    ranks along `tp` are a mesh of two axes for the weights of experts: `expert` of them in `ep`, and within these `etp`."""

    axes: tuple[tuple[str, int], ...] = ()
    expert: int = 1
    """Number of parts of the `tp` ranks that hold different experts."""

    @property
    def num_ranks(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        if axis in EXPERT_AXES:
            return self.expert if axis == "ep" else self.size("tp") // self.expert
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int, axis: str) -> int:
        if axis in EXPERT_AXES:
            part, inside = divmod(self.coordinate(rank, "tp"), self.size("etp"))
            return part if axis == "ep" else inside
        for name, size in reversed(self.axes):
            if name == axis:
                return rank % size
            rank //= size
        return 0


class Cut(Struct, frozen=True):
    """Deals out dimension `dim` of a parameter, in whole units, to the ranks along `axis` of the mesh."""

    axis: str
    dim: int
    unit: int = 1


Placement = tuple[Cut, ...]


def box_on(rank: int, shape: tuple[int, ...], placement: Placement, mesh: Mesh) -> Box:
    """The box of a parameter that a rank holds."""
    box = list(whole(shape))
    for cut in placement:
        first, end = box[cut.dim]
        box[cut.dim] = chunk(first, end, mesh.size(cut.axis), mesh.coordinate(rank, cut.axis), cut.unit)
    return tuple(box)


class Side(Struct, frozen=True):
    """One end of a transfer, written 'tp=8,replicas=64,precision=fp8' on the command line."""

    mesh: Mesh
    precision: str


def parse_side(option: str, text: str, precision: str) -> Side:
    sizes, known = dict[str, int](), (*AXES, "ep")
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key == "precision" and value in PRECISIONS:
            precision = value
        elif key in known and key not in sizes and value.isascii() and value.isdigit() and 0 < int(value) <= 1 << 20:
            sizes[key] = int(value)
        else:
            raise InputError(
                f"{option}: cannot read '{part}'; write {', '.join(f'{axis}=N' for axis in known)} or "
                f"precision={'|'.join(PRECISIONS)}, each once, with commas in between"
            )
    expert, tensor = sizes.get("ep", 1), sizes.get("tp", 1)
    if tensor % expert:
        raise InputError(f"{option}: ep={expert} parts of the tp={tensor} ranks would not be equal; ep must divide tp")
    return Side(Mesh(tuple((axis, sizes[axis]) for axis in AXES if axis in sizes), expert), precision)
