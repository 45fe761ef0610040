"""What a rehearsal finds: the memory of a role's ranks, beside the planner's formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from llamarl.plan.gpus import GIB, Gpu
from llamarl.plan.terms import WORKSPACE_BYTES


class RankMemory(Struct, frozen=True):
    """Memory of one rank's tensors at its fullest moment."""

    rank: int
    kinds: dict[str, float]  # bytes by kind
    building_bytes: float = 0.0  # peak while the rank was built, before it began to work

    @property
    def total_bytes(self) -> float:
        return sum(self.kinds.values())


class RoleMemory(Struct, frozen=True):
    """Memory of the first and the last rank of a role, as built and as planned."""

    role: str
    layout: str
    formula: dict[str, float]  # bytes by kind
    ranks: list[RankMemory]

    @property
    def formula_bytes(self) -> float:
        return sum(self.formula.values())

    @property
    def built_bytes(self) -> float:
        """Bytes of the fuller rank."""
        return max(rank.total_bytes for rank in self.ranks)

    @property
    def difference(self) -> float:
        """Formula relative to what was built, less 1."""
        return self.formula_bytes / self.built_bytes - 1


def too_large(roles: Sequence[RoleMemory], gpu: Gpu, *, colocated: bool) -> Iterator[str]:
    """One line for everything that does not fit into a GPU, or not while it is built."""
    room = f"of {gpu.memory_gib:.0f} GiB on one {gpu.name}"
    together = [("+".join(role.role for role in roles), sum(role.built_bytes for role in roles))]
    for name, num_bytes in together if colocated else [(role.role, role.built_bytes) for role in roles]:
        if num_bytes + WORKSPACE_BYTES > gpu.memory_bytes:
            yield f"{name}: takes {num_bytes / GIB:.1f} GiB and {WORKSPACE_BYTES / GIB:.0f} GiB for CUDA, {room}"
    for role in roles:
        building = max(rank.building_bytes for rank in role.ranks)
        if role.built_bytes < building and building + WORKSPACE_BYTES > gpu.memory_bytes:
            yield f"{role.role}: takes {building / GIB:.1f} GiB while it is built, before its weights are narrowed, {room}"


def table_of(roles: Sequence[RoleMemory]) -> list[str]:
    """Lines of a text table: kinds of memory in GiB, built and planned."""
    lines = ["rehearsed on fake tensors, GiB on one GPU"]
    for role in roles:
        heads = "".join(f"{f'rank {rank.rank}':>12}" for rank in role.ranks)
        lines.append(f"  {f'{role.role}: {role.layout}':<62}{heads}{'formula':>12}")
        for kind in dict.fromkeys([*role.formula, *role.ranks[0].kinds]):
            built = "".join(_gib(rank.kinds.get(kind, 0.0)) for rank in role.ranks)
            lines.append(f"    {kind:<60}{built}{_gib(role.formula.get(kind, 0.0))}")
        totals = "".join(_gib(rank.total_bytes) for rank in role.ranks)
        lines.append(f"    {'together':<60}{totals}{_gib(role.formula_bytes)}  {role.difference:+.1%}")
    return lines


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:>12.2f}"
