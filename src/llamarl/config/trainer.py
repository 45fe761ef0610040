"""`trainer`: how an update is computed, and on which devices."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Device, Section, Threads, check_expert
from llamarl.errors import ConfigError


class TrainerConfig(Section, frozen=True):
    """The optimizer, and the precision, parallelism and memory of an update; see docs/training-at-scale.md."""

    lr: Annotated[float, Meta(gt=0, le=1, description="AdamW's learning rate")] = 8e-5
    warmup_updates: Annotated[int, Meta(ge=0, description="updates over which lr rises linearly from 0")] = 10
    final_lr_share: Annotated[
        float, Meta(ge=0, le=1, description="share of lr to which it falls linearly after the warm-up")
    ] = 0.1
    betas: Annotated[tuple[float, float], Meta(description="AdamW's betas, each in [0, 1)")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's weight decay, applied to matrices only")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="norm to which larger gradients are clipped")] = 1.0
    replicate: Annotated[
        int,
        Meta(
            ge=1,
            description="copies of the data * context * tensor ranks (HSDP); gradients are summed over them once per update",
        ),
    ] = 1
    data: Annotated[int, Meta(ge=1, description="data-parallel ranks, which also shard the weights (FSDP)")] = 1
    context: Annotated[
        int,
        Meta(
            ge=1,
            description="ranks that share the tokens of each pack (context parallel), for sequences that one GPU cannot "
            "hold; they shard the weights too",
        ),
    ] = 1
    tensor: Annotated[
        int, Meta(ge=1, description="tensor-parallel ranks; there are replicate * data * context * tensor processes")
    ] = 1
    expert: Annotated[
        int,
        Meta(
            ge=1,
            description="models with experts: parts of the tensor ranks that hold different experts, whole or, where it is "
            "less than tensor, cut over the ranks of a part; it divides tensor; 1: all tensor ranks share every expert",
        ),
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="precision of the passes; master weights and moments are float32; auto: bfloat16 on a GPU; float16: "
            "float16 forward products and otherwise bfloat16, closer to the log-probs of a float16 generator"
        ),
    ] = "auto"
    tokens_per_pack: Annotated[
        int,
        Meta(
            ge=16,
            description="most tokens in one forward and backward pass, which context ranks share; a longer sequence goes "
            "alone",
        ),
    ] = 16_384
    share_prompts: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="compute once per pack what documents begin with, such as the prompt of a group; auto: where that "
            "saves time; on: wherever documents begin alike; off: never"
        ),
    ] = "auto"
    cudnn_from: Annotated[
        int,
        Meta(
            ge=0,
            description="sequences of at least so many tokens that have a pass to themselves, or with others of their length "
            "only, and share no prompt there, take cuDNN's attention, on a GPU in bf16: faster for long ones; 0: none",
        ),
    ] = 0
    recompute: Annotated[
        Literal["none", "selective", "offload", "full"],
        Meta(
            description="activations recomputed in the backward pass: none, those of the MLPs, or whole blocks; offload: "
            "those of the MLPs, while all others wait in host memory"
        ),
    ] = "none"
    compile: Annotated[
        Literal["auto", "on", "off"], Meta(description="compile the blocks with torch.compile; auto: on a GPU")
    ] = "auto"
    replay_routes: Annotated[
        bool,
        Meta(
            description="models with experts: the generator records which experts computed each token, and the trainer takes "
            "the same ones; false: it chooses them itself"
        ),
    ] = True
    balance_loss: Annotated[
        float,
        Meta(
            ge=0,
            description="models with experts: weight of the loss that asks routers to use all experts equally, as "
            "transformers computes it (router_aux_loss_coef); 0: none, as RL leaves the policy its routing",
        ),
    ] = 0.0
    offload: Annotated[
        bool, Meta(description="keep the optimizer state in host memory between updates (for large models)")
    ] = False
    device: Device = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"trainer.betas: each must lie in [0, 1), got {list(self.betas)}")
        if self.dtype == "float16" and self.tensor > 1:
            raise ConfigError("trainer.dtype: float16 products are not shared over ranks; set trainer.tensor to 1")
        if self.cudnn_from and self.context > 1:
            raise ConfigError("trainer.cudnn_from: ranks that share a pass have an attention of their own; set it to 0")
        if self.cudnn_from and self.dtype not in ("auto", "bfloat16"):
            raise ConfigError(f"trainer.cudnn_from: cuDNN's attention is for bf16, not {self.dtype}; set it to 0")

        check_expert("trainer", self.expert, self.tensor)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard_ranks

    @property
    def shard_ranks(self) -> int:
        """Ranks of one replica, which hold the model once."""
        return self.fsdp_ranks * self.tensor

    @property
    def fsdp_ranks(self) -> int:
        """Ranks that FSDP shards the weights over."""
        return self.data * self.context

    @property
    def batch_ranks(self) -> int:
        """Ranks that share an update's documents."""
        return self.replicate * self.data
