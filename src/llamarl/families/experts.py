"""The families with mixtures of experts, one table each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from llamarl.errors import ModelError
from llamarl.families.decoder import EMBEDDING, HEAD, after_layers, before_layers, layer_parameters
from llamarl.families.dense import ATTENTION_BIAS, GRANITE_MULTIPLIERS, bound
from llamarl.families.family import Config, ConfigKey, Family, ParameterSpec
from llamarl.model_spec import ModelSpec

_EACH = {
    "expert_in": ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "expert_out": ("mlp.experts.{expert}.down_proj.weight",),
}
_GRANITE_FILES = {
    "router": ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    "expert_in": ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    "expert_out": ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
}
_HARMLESS = ("router_aux_loss_coef", "output_router_logits")
_NORMALIZED = ConfigKey("norm_topk_prob", ("normalize_routes",), False, bool, written=True)


def _experts(key: str, default: int, *also: str) -> ConfigKey:
    return ConfigKey(key, ("experts",), default, int, written=True, also=also)


def _per_token(default: int) -> ConfigKey:
    return ConfigKey("num_experts_per_tok", ("experts_per_token",), default, int, written=True)


def _family(**table: Any) -> Family:
    table.setdefault("layer", _one_by_one)
    return Family(embedding=EMBEDDING, head=HEAD, before=before_layers, after=after_layers, harmless=_HARMLESS, **table)


def _one_by_one(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """A layer whose experts have matrices of their own in files."""
    for parameter in layer_parameters(spec):
        yield replace(parameter, each=_EACH.get(parameter.kind, ()))


def _granite_layer(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """A layer whose experts lie in one tensor in files, under other names."""
    for parameter in layer_parameters(spec):
        stored, also = _GRANITE_FILES.get(parameter.kind, ("", ""))
        yield replace(parameter, stored=stored, also=also)


def _dense_layers(config: Config) -> Mapping[str, Any]:
    """Layers without experts: those that are listed, and all but every n-th."""
    layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise ModelError(f"'decoder_sparse_step' must be a number of layers, at least 1, is {json.dumps(step)[:60]}")
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise ModelError(f"'mlp_only_layers' must list numbers of layers, is {json.dumps(listed)[:60]}")
    dense = tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
    if len(dense) == layers:
        raise ModelError("'mlp_only_layers' and 'decoder_sparse_step' leave no layer with experts")
    return {"dense_layers": dense}


def _all_inner(config: Config) -> Mapping[str, Any]:
    """All MLPs are experts."""
    return {"expert_size": config["intermediate_size"]}


QWEN3_MOE = _family(
    name="qwen3_moe",
    title="Qwen3 with experts (30B-A3B, 235B-A22B)",
    architecture="Qwen3MoeForCausalLM",
    fixed={"qk_norm": True},
    keys=(
        ATTENTION_BIAS,
        _experts("num_experts", 128, "num_local_experts"),
        _per_token(8),
        ConfigKey("moe_intermediate_size", ("expert_size",), 768, int, written=True),
        _NORMALIZED,
    ),
    more_keys=("mlp_only_layers", "decoder_sparse_step"),
    sized=_dense_layers,
    described=lambda spec: {"mlp_only_layers": list(spec.dense_layers), "decoder_sparse_step": 1},
    needs=("num_key_value_heads",),
    defaults={"sliding_window": 4096},
    windowed=lambda layer, config: True,
    window_switch="use_sliding_window",
)

OLMOE = _family(
    name="olmoe",
    title="OLMoE",
    architecture="OlmoeForCausalLM",
    fixed={"wide_qk_norm": True},
    keys=(
        ATTENTION_BIAS,
        bound("clip_qkv", "clip_qkv", written=False),
        _experts("num_experts", 64, "num_local_experts"),
        _per_token(8),
        _NORMALIZED,
    ),
    sized=_all_inner,
    defaults={"rms_norm_eps": 1e-5},
)

GRANITE_MOE = _family(
    name="granitemoe",
    title="Granite 3, 3.1 with experts (1B-A400M, 3B-A800M)",
    architecture="GraniteMoeForCausalLM",
    layer=_granite_layer,
    fixed={"normalize_routes": True},
    keys=(ATTENTION_BIAS, *GRANITE_MULTIPLIERS, _experts("num_local_experts", 8, "num_experts"), _per_token(2)),
    sized=_all_inner,
)

EXPERTS = (QWEN3_MOE, OLMOE, GRANITE_MOE)
