"""`observe`: what is recorded besides the run folder."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class ObserveConfig(Section, frozen=True):
    tensorboard: Annotated[bool, Meta(description="also write metrics for TensorBoard into the run folder")] = False
    events_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="size of the controller's event log (some 25 bytes a group), beyond which it is not written on; "
            "0: none",
        ),
    ] = 1024
