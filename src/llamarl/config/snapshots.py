"""`snapshots`: when the state of training is saved."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class SnapshotsConfig(Section, frozen=True):
    every: Annotated[int, Meta(ge=0, description="updates between snapshots; 0: only one at the end")] = 25
    keep: Annotated[int, Meta(ge=1, description="newest snapshots that are kept")] = 2
    at_end: Annotated[
        Literal["whole", "policy", "none"],
        Meta(
            description="when all updates are made: a whole snapshot; the policy alone, in the model folder's precision, for "
            "runs that nobody will resume; or none"
        ),
    ] = "whole"
