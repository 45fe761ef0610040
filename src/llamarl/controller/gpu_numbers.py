"""Which GPUs of a host each role takes, where the config says `auto` and the engine assigns none."""

from __future__ import annotations

from typing import Literal

from llamarl.controller.line import Line


def first_gpus(line: Line, placement: Literal["split", "colocated"]) -> dict[str, int]:
    """The number of the first GPU of every role that uses GPUs. Roles side by side have GPUs of their own; co-located ones
    share them. Where there are too few, numbers wrap around, so the roles that publish come first, then those that read
    their weights, then the others from the end of the line."""
    on_gpus = [role for role in reversed(line.roles) if role.gpu]
    on_gpus.sort(key=lambda role: (role.name not in line.publishers, role.name not in line.weights_source))
    numbers, first = dict[str, int](), 0
    for role in on_gpus:
        numbers[role.name] = first
        first += role.executors * role.ranks if placement == "split" else 0
    return numbers
