"""`model`: the policy that is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.lora import LoraConfig
from llamarl.config.section import Section
from llamarl.errors import ConfigError


class ModelConfig(Section, frozen=True):
    """The policy that is trained; see docs/models.md."""

    path: Annotated[
        str,
        Meta(
            description="folder with config.json, *.safetensors and tokenizer.json; 'tiny' is the shipped model, 'tiny-moe' "
            "the one with experts"
        ),
    ] = "tiny"
    adapter: Annotated[
        str,
        Meta(
            description="folder of a PEFT adapter to start from; needs model.lora; empty: start from the model itself"
        ),
    ] = ""
    lora: LoraConfig = LoraConfig()
    base: Annotated[
        Literal["auto", "bf16", "fp8"],
        Meta(
            description="with model.lora, precision of the frozen weights, in trainer and generator alike: fp8 halves their "
            "memory; auto: that of trainer.dtype and generator.dtype"
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.adapter and not self.lora:
            raise ConfigError(
                "model.adapter: adapters are trained with model.lora; set model.lora.rank to the folder's rank"
            )
        if self.base != "auto" and not self.lora:
            raise ConfigError(f"model.base: {self.base} cannot take effect without adapters; set model.lora.rank")
