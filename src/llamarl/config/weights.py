"""`weights`: how published weights reach the generators."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class WeightsConfig(Section, frozen=True):
    """Where weight slots are, and how long a reader may hold one; see docs/weights.md."""

    lease_s: Annotated[
        float, Meta(gt=0, description="longest time a reader may hold a weight slot before it is killed")
    ] = 30.0
    transport: Annotated[
        Literal["auto", "memfd", "cuda"],
        Meta(
            description="weight slots in host memory (memfd) or device memory (cuda: fast, needs twice a rank's weights); "
            "auto: device memory if all ranks are on GPUs that can reach each other"
        ),
    ] = "auto"
