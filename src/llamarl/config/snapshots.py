"""`snapshots`: when the state of training is saved."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class SnapshotsConfig(Section, frozen=True):
    """When the state of training is saved, and how many snapshots are kept; see docs/durability.md."""

    every: Annotated[int, Meta(ge=0, description="updates between snapshots; 0: only at the end")] = 25
    keep: Annotated[int, Meta(ge=1, description="number of newest snapshots to keep")] = 2
    at_end: Annotated[
        Literal["whole", "policy", "none"],
        Meta(
            description="after the last update, save a whole snapshot; only the policy, in the model folder's precision, "
            "if the run will not be resumed; or nothing"
        ),
    ] = "whole"
