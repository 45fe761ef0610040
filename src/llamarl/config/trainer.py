"""`trainer`: how an update is computed, and on what."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Device, Section, Threads
from llamarl.errors import ConfigError


class TrainerConfig(Section, frozen=True):
    lr: Annotated[float, Meta(gt=0, le=1, description="AdamW's learning rate")] = 8e-5
    warmup_updates: Annotated[int, Meta(ge=0, description="updates over which lr rises linearly from 0")] = 10
    final_lr_share: Annotated[
        float, Meta(ge=0, le=1, description="after the warm-up lr falls linearly to this share of itself")
    ] = 0.1
    betas: Annotated[tuple[float, float], Meta(description="AdamW's averaging factors, each in [0, 1)")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's, on matrices only")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="gradients are scaled down to this norm")] = 1.0
    data: Annotated[int, Meta(ge=1, description="ranks that share an update's tokens and the weights (FSDP)")] = 1
    tensor: Annotated[
        int, Meta(ge=1, description="ranks that share every product (tensor parallel); data * tensor processes in all")
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="of the passes; master weights and moments are float32; auto: bfloat16 on a GPU; float16: forward "
            "products take float16, all else is as with bfloat16, and a float16 generator's log-probs are nearer"
        ),
    ] = "auto"
    tokens_per_pack: Annotated[
        int, Meta(ge=16, description="most tokens of one forward and backward pass; a longer sequence goes alone")
    ] = 16_384
    recompute: Annotated[
        Literal["none", "selective", "full"],
        Meta(description="activations made again in the backward pass: none, those of the MLPs, or of whole blocks"),
    ] = "none"
    compile: Annotated[
        Literal["auto", "on", "off"], Meta(description="compile the blocks with torch.compile; auto: on a GPU")
    ] = "auto"
    offload: Annotated[
        bool, Meta(description="keep the optimizer's state in host memory between updates (for large models)")
    ] = False
    device: Device = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"trainer.betas: each must lie in [0, 1), got {list(self.betas)}")
        if self.dtype == "float16" and self.tensor > 1:
            raise ConfigError("trainer.dtype: float16 products are not shared over ranks; set trainer.tensor to 1")

    @property
    def ranks(self) -> int:
        return self.data * self.tensor
