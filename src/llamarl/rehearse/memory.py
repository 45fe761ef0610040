"""What a rehearsal finds."""

from __future__ import annotations

from msgspec import Struct


class RankMemory(Struct, frozen=True):
    """Memory of one rank at its fullest moment."""

    rank: int
    kinds: dict[str, float]  # bytes by kind
    peak_bytes: float
    building_bytes: float = 0.0  # peak while the rank was built, before it began to work
