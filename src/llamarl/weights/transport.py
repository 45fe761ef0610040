"""What every transport offers. A publication has a version, becomes visible all at once, and is verified by its reader."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Publication(Struct, frozen=True):
    version: int
    checksum: str
    num_bytes: int
    changed: bool = True  # False: this version was published before, with the same bytes


class WeightWriter(Protocol):
    def publish(self, version: int) -> Publication:
        """Make the writer's current weights readable as `version`."""


class WeightReader(Protocol):
    def load(self, version: int) -> int:
        """Replace the reader's weights by `version`, in place; returns the bytes moved.

        StaleWeights when the version is gone, CorruptWeights when its bytes are not what was published; in both cases
        the reader keeps the weights it had.
        """
