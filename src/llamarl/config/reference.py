"""`reference`: a fixed policy that the trained one may not leave too far behind."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Device, Section, Threads


class ReferenceConfig(Section, frozen=True):
    """The policy that `algo.reference_kl` holds the trained one against."""

    model: Annotated[str, Meta(description="its model folder; empty: the one training starts from")] = ""
    place: Annotated[
        Literal["own", "trainer"],
        Meta(description="on ranks of its own, or on the trainer's, its weights in host memory between uses"),
    ] = "own"
    data: Annotated[int, Meta(ge=1, description="place=own: ranks that share an update's tokens and the weights")] = 1
    tensor: Annotated[int, Meta(ge=1, description="place=own: ranks that share every product")] = 1
    device: Device = "auto"
    threads: Threads = 0

    @property
    def ranks(self) -> int:
        return self.data * self.tensor
