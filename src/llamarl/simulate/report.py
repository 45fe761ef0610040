"""The result of a simulation as a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.simulate.simulation import SimulationResult


def describe_memory(memory_gib: dict[str, float], room_gib: float) -> str:
    needed = ", ".join(f"{role} {gib:.1f} GiB" for role, gib in memory_gib.items())
    fits = "" if max(memory_gib.values()) <= room_gib else ": DOES NOT FIT; `llamarl plan` finds what does"
    return f"memory         {needed} of {room_gib:.0f} on a GPU{fits}"


def describe_outcome(found: SimulationResult, useful_share: float | None) -> Iterator[str]:
    yield f"update         {found.update_s:,.3f} s (mean of {found.updates}, once the line is full)"
    yield f"whole run      {_long(found.wall_s)}"
    idle = ", ".join(f"{role} {share:.0%}" for role, share in sorted(found.idle_share.items()))
    yield f"waiting        {idle}"
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in found.staleness.items())
    yield f"staleness      {ages} of the groups"
    if found.replaced:
        yield f"replaced       {found.replaced / found.updates:,.1f} groups without variance for each update"
    if useful_share is not None:
        yield (
            f"useful time    {useful_share:.1%}, with {found.deaths} deaths and {found.redone_updates} updates made twice"
        )
    each_us = 1e6 * found.controller_s / max(1, found.groups)
    yield f"rehearsed      {found.events:,} events; the controller took {each_us:,.0f} us for each group"


def _long(seconds: float) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{int(hours)} h {int(rest // 60)} min" if hours else f"{int(rest // 60)} min {rest % 60:.0f} s"
