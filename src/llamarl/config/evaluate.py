"""`evaluate`: when held-out problems are asked."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class EvaluateConfig(Section, frozen=True):
    prompts: Annotated[int, Meta(ge=0, description="held-out problems answered greedily; 0 switches it off")] = 512
    every: Annotated[int, Meta(ge=0, description="also evaluate every so many updates; 0: only before and after")] = 0
    split: Annotated[
        Literal["held_out", "test"],
        Meta(description="problems that were held out by hash, or the fixed test problems of the task"),
    ] = "held_out"
