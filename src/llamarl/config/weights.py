"""`weights`: how weights reach those that read them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class WeightsConfig(Section, frozen=True):
    lease_s: Annotated[
        float, Meta(gt=0, description="a reader that holds a weight slot longer than this is declared dead")
    ] = 30.0
    transport: Annotated[
        Literal["auto", "memfd", "cuda"],
        Meta(
            description="slots in host memory (memfd) or device memory (cuda: fast, takes twice a rank's weights); auto: "
            "device memory if all sit on GPUs that reach each other"
        ),
    ] = "auto"
