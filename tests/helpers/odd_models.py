"""Small specs of families that use every switch of the model, and models of them whose every parameter counts."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from helpers.models import SHAPE
from llamarl.model.checkpoint import random_model
from llamarl.model.transformer import Transformer
from llamarl.model_spec import LongScaling, ModelSpec, YarnScaling

_YARN = YarnScaling(factor=4.0, original_max_positions=16, attention_factor=1.1)
ODD: dict[str, ModelSpec] = {
    "llama": replace(SHAPE, qkv_bias=True, out_bias=True, mlp_bias=True, rope_scaling=_YARN),
    "mistral": replace(SHAPE, family="mistral", windows=(5, 5)),
    "olmo2": replace(SHAPE, family="olmo2", norms="post", wide_qk_norm=True, qkv_bias=True, out_bias=True),
    "olmo3": replace(
        SHAPE,
        family="olmo3",
        norms="post",
        wide_qk_norm=True,
        windows=(4, 0),
        rope_scaling=_YARN,
        local_rope_theta=SHAPE.rope_theta,
    ),
    "phi3": replace(
        SHAPE,
        family="phi3",
        rotary_dim=4,
        rope_scaling=LongScaling(
            short_factors=(1.0, 1.5), long_factors=(2.0, 3.0), attention_factor=1.1, long_max_positions=128
        ),
        windows=(6, 6),
    ),
    "granite": replace(
        SHAPE,
        family="granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_scale=0.3,
        logit_divisor=2.0,
        mlp_bias=True,
    ),
    "gemma2": replace(
        SHAPE,
        family="gemma2",
        norms="sandwich",
        norm_plus_one=True,
        activation="gelu_tanh",
        tied_head=True,
        windows=(5, 0),
        attention_scale=24.0**-0.5,
        attention_softcap=3.0,
        logit_softcap=4.0,
        embedding_multiplier=SHAPE.hidden_size**0.5,
    ),
    "gemma3_text": replace(
        SHAPE,
        family="gemma3_text",
        norms="sandwich",
        norm_plus_one=True,
        activation="gelu_tanh",
        qk_norm=True,
        windows=(0, 5),
        local_rope_theta=100.0,
        attention_scale=0.25,
        embedding_multiplier=SHAPE.hidden_size**0.5,
    ),
}
EXPERTS: dict[str, ModelSpec] = {
    "qwen3_moe": replace(
        SHAPE,
        family="qwen3_moe",
        qk_norm=True,
        experts=4,
        experts_per_token=2,
        expert_size=12,
        normalize_routes=True,
        dense_layers=(0,),
    ),
    "olmoe": replace(
        SHAPE,
        family="olmoe",
        intermediate_size=8,
        wide_qk_norm=True,
        clip_qkv=0.5,
        experts=5,
        experts_per_token=3,
        expert_size=8,
    ),
    "granitemoe": replace(
        SHAPE,
        family="granitemoe",
        intermediate_size=8,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_scale=0.3,
        logit_divisor=2.0,
        experts=3,
        experts_per_token=2,
        expert_size=8,
        normalize_routes=True,
    ),
}
ALL = ODD | EXPERTS


def odd_model(spec: str | ModelSpec, seed: int = 0) -> Transformer:
    """A model of a spec, or of one of these by name. Biases and norms at their neutral values would hide a missing one."""
    model = random_model(ALL[spec] if isinstance(spec, str) else spec, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
            else:
                neutral = 0.0 if model.shape.norm_plus_one or "norm" not in parameter_name else 1.0
                parameter.normal_(neutral, 0.2, generator=generator)
    return model
