"""How the policy generates and learns: generator, trainer, algorithm, reference policy."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Device, Section, Threads
from llamarl.errors import ConfigError


class Generator(Section, frozen=True):
    replicas: Annotated[int, Meta(ge=1, description="copies of the policy that generate side by side")] = 1
    tensor: Annotated[
        int, Meta(ge=1, description="ranks of one replica, which share every product (tensor parallel)")
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="of weights and KV cache; auto: bfloat16 on a GPU, float32 elsewhere; float16: see trainer.dtype"
        ),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "fp8", "int8"],
        Meta(
            description="narrow copies of the blocks' matrices, made of each new version; fp8 also narrows their inputs"
        ),
    ] = "none"
    kv_cache: Annotated[
        Literal["auto", "fp8"], Meta(description="precision of keys and values; auto: that of dtype")
    ] = "auto"
    slots: Annotated[int, Meta(ge=1, description="completions decoded at once by one replica")] = 768
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="a longer prompt is dropped, with the reason")] = 32
    max_new_tokens: Annotated[int, Meta(ge=1, description="longest completion, in tokens")] = 8
    temperature: Annotated[
        float, Meta(ge=0.01, le=10, description="of the sampling; also divides the trainer's logits")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="sample from the k likeliest tokens only; 0: from all")] = 0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="sample from the fewest likeliest tokens that make up this probability")
    ] = 1.0
    min_p: Annotated[
        float, Meta(ge=0, lt=1, description="leave out tokens less likely than this share of the likeliest")
    ] = 0.0
    page_tokens: Annotated[int, Meta(ge=1, description="tokens in one page of the KV cache")] = 16
    kv_pages: Annotated[
        int, Meta(ge=0, description="pages of the KV cache; 0: enough for all slots, as far as a GPU's memory goes")
    ] = 0
    kv_on_new_weights: Annotated[
        Literal["keep", "recompute"],
        Meta(description="keys and values of answers under way when weights change: keep them, or compute them anew"),
    ] = "keep"
    burst: Annotated[
        int, Meta(ge=0, description="decode steps between two looks at the results; 0: 1 on a CPU, 8 on a GPU")
    ] = 0
    device: Device = "auto"
    threads: Threads = 0


class Trainer(Section, frozen=True):
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


class Algo(Section, frozen=True):
    loss: Annotated[
        str,
        Meta(
            description="aipo, reinforce, rloo, ppo, grpo, cispo, gspo, or FILE.py:FUNCTION called as loss(tokens, algo)"
        ),
    ] = "aipo"
    advantage: Annotated[
        Literal["auto", "mean", "leave_one_out", "mean_std"],
        Meta(description="what a reward is held against: its group's mean ...; auto: what the loss was published with"),
    ] = "auto"
    rho: Annotated[float, Meta(gt=0, description="AIPO's upper clip of the importance weight; 2 to 10 works well")] = (
        4.0
    )
    clip_low: Annotated[float, Meta(ge=0, le=1, description="ppo, grpo: a ratio below 1 - this stops pulling")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="ppo, grpo: a ratio above 1 + this stops pulling")] = 0.2
    cispo_high: Annotated[float, Meta(ge=0, description="cispo: the importance weight is cut at 1 + this")] = 4.0
    gspo_low: Annotated[float, Meta(ge=0, le=1, description="gspo: clip of a whole answer's ratio, downwards")] = 3e-4
    gspo_high: Annotated[float, Meta(ge=0, description="gspo: clip of a whole answer's ratio, upwards")] = 4e-4
    reference_kl: Annotated[
        float, Meta(ge=0, description="weight of the KL to the reference policy; above 0 puts a reference on the line")
    ] = 0.0
    entropy: Annotated[float, Meta(ge=0, description="weight of an entropy bonus")] = 0.0
    overlong: Annotated[
        Literal["keep", "mask", "penalize"],
        Meta(description="answers cut off at the token limit: keep, take out of the loss, or take from their reward"),
    ] = "keep"
    overlong_penalty: Annotated[
        float, Meta(ge=0, description="what overlong=penalize takes from the reward of an answer that was cut off")
    ] = 1.0
    zero_variance: Annotated[
        Literal["keep", "skip"],
        Meta(description="groups whose rewards are all equal: keep their tokens in the loss's denominator, or skip"),
    ] = "skip"


class Reference(Section, frozen=True):
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
