"""`reference`: the fixed policy that a KL term keeps the trained one close to."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import OwnRanks


class ReferenceConfig(OwnRanks, frozen=True):
    """The fixed policy of the KL term `algo.reference_kl`, and where it runs."""

    model: Annotated[str, Meta(description="model folder of the reference; empty: the one at model.path")] = ""
    place: Annotated[
        Literal["own", "trainer"],
        Meta(
            description="on its own ranks, or on the trainer's, with its weights in host memory between uses; with "
            "model.lora, the trainer's own base is used, at no cost"
        ),
    ] = "own"
