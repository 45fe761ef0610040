"""`reward_model`: a model whose score is added to the reward."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Device, Section, Threads
from llamarl.errors import ConfigError


class RewardModelConfig(Section, frozen=True):
    """A model that runs after the scorer and whose score is added to the reward."""

    path: Annotated[
        str, Meta(description="Hugging Face folder of a sequence classifier with one label; empty: no reward model")
    ] = ""
    weight: Annotated[
        float, Meta(description="weight of its score in the reward; reward.scorer=none leaves it as the only score")
    ] = 1.0
    squash: Annotated[bool, Meta(description="pass the score through a sigmoid, so that it lies in (0, 1)")] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="precision of its weights; auto: bfloat16 on a GPU, float32 elsewhere"),
    ] = "auto"
    device: Device = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError("reward_model.weight: must be a finite number")
