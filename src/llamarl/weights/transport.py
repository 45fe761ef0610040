"""Interface of every transport. A publication has a version, becomes visible all at once, and is verified by its reader."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Publication(Struct, frozen=True):
    """A version that readers can load."""

    version: int
    checksum: str
    num_bytes: int
    changed: bool = True  # False: the same version was published before, with the same bytes


class WeightWriter(Protocol):
    """The trainer's end of a transport."""

    def publish(self, version: int) -> Publication:
        """Makes the writer's current weights readable as `version`."""


class NoReaders:
    """The end of no transport: a job without generators publishes nothing."""

    def publish(self, version: int) -> Publication:
        raise AssertionError(f"version {version} was to be published, but no role reads weights")


class WeightReader(Protocol):
    """The generator's end of a transport."""

    def load(self, version: int) -> int:
        """Replaces the reader's weights by `version`, in place; returns the number of bytes moved.

        Raises StaleWeights if the version is gone and CorruptWeights if its bytes are not those that were published; in both
        cases the reader keeps its weights.
        """
