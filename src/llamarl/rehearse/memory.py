"""What a rehearsal finds: the memory of a role's ranks, beside the planner's formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from llamarl.machine import GIB
from llamarl.plan.gpus import Gpu
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


def too_large(
    roles: Sequence[RoleMemory], gpu: Gpu, *, together: bool, processes: int = 1, shared_bytes: float = 0.0
) -> Iterator[str]:
    """One line for everything that does not fit into a GPU, or not while it is built. `together`: one GPU holds a rank of
    every role, in so many processes, of which `shared_bytes` only once."""
    room = f"of {gpu.memory_gib:.0f} GiB on one {gpu.name}"
    whole = sum(role.built_bytes for role in roles) - shared_bytes
    held = (
        [("+".join(role.role for role in roles), whole)] if together else [(one.role, one.built_bytes) for one in roles]
    )
    for name, num_bytes in held:
        cuda_bytes = WORKSPACE_BYTES * (processes if together else 1)
        if num_bytes + cuda_bytes > gpu.memory_bytes:
            yield f"{name}: takes {num_bytes / GIB:.1f} GiB and {cuda_bytes / GIB:.0f} GiB for CUDA, {room}"
    for role in roles:
        building = max(rank.building_bytes for rank in role.ranks)
        if role.built_bytes < building and building + WORKSPACE_BYTES > gpu.memory_bytes:
            yield f"{role.role}: takes {building / GIB:.1f} GiB while it is built, before its weights are narrowed, {room}"


def built_figures(role: RoleMemory) -> dict[str, Any]:
    """The figures of a rehearsed role for `--json`, in bytes."""
    found: dict[str, Any] = to_builtins(role)
    return {**found, "formula_bytes": role.formula_bytes, "built_bytes": role.built_bytes, "off_by": role.difference}


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
