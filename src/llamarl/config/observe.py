"""`observe`: optional records of a run."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class ObserveConfig(Section, frozen=True):
    """Records in the run folder that can be switched on or limited."""

    tensorboard: Annotated[bool, Meta(description="also write metrics for TensorBoard into the run folder")] = False
    events_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="size limit of the controller's event log (about 25 bytes per group); 0: no event log",
        ),
    ] = 1024
    rollouts_mb: Annotated[
        int,
        Meta(
            ge=-1,
            description="size limit of the trained rollouts that stay readable, shared by all updates: whole groups, "
            "at least one of each update; -1: all rollouts, 0: none",
        ),
    ] = 1024
    spans_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="size limit of spans.jsonl, the timeline that `llamarl view` shows of a live or crashed run; 0: none",
        ),
    ] = 128
