"""`evaluate`: when and on which problems the policy is evaluated."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class EvaluateConfig(Section, frozen=True):
    """How often the policy is evaluated, and on which problems."""

    prompts: Annotated[int, Meta(ge=0, description="problems per evaluation, answered greedily; 0: no evaluation")] = (
        512
    )
    every: Annotated[int, Meta(ge=0, description="updates between evaluations; 0: only before and after the run")] = 0
    split: Annotated[
        Literal["held_out", "test"],
        Meta(description="which problems: those held out by hash, or the task's fixed test problems"),
    ] = "held_out"
