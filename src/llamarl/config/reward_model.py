"""`reward_model`: a model on the line that adds its score."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Device, Section, Threads
from llamarl.errors import ConfigError


class RewardModelConfig(Section, frozen=True):
    """A model on the line behind the scorer, whose score is added to the reward."""

    path: Annotated[
        str, Meta(description="its Hugging Face sequence-classification folder (one label); empty: no such role")
    ] = ""
    weight: Annotated[
        float, Meta(description="of its score in the reward; set reward.scorer=none to have it alone")
    ] = 1.0
    squash: Annotated[bool, Meta(description="its score through a sigmoid, so that it lies between 0 and 1")] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="auto: bfloat16 on a GPU, float32 elsewhere")
    ] = "auto"
    device: Device = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError("reward_model.weight: must be a finite number")
