"""The dense model families, one table each. A family that needs no new operation is one more entry here, and its tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from llamarl.families.decoder import EMBEDDING, HEAD, after_layers, before_layers, layer_parameters
from llamarl.families.family import Config, ConfigKey, Family, ParameterSpec
from llamarl.model_spec import ModelSpec

ATTENTION_BIAS = ConfigKey("attention_bias", ("qkv_bias", "out_bias"), False, bool, written=True)
_MLP_BIAS = ConfigKey("mlp_bias", ("mlp_bias",), False, bool)
_KV_HEADS = ("num_key_value_heads",)


def _dense(**table: Any) -> Family:
    table.setdefault("layer", layer_parameters)
    return Family(embedding=EMBEDDING, head=HEAD, before=before_layers, after=after_layers, **table)


LLAMA = _dense(
    name="llama",
    title="Llama 2, 3, 3.1, 3.2, SmolLM2",
    architecture="LlamaForCausalLM",
    keys=(ATTENTION_BIAS, _MLP_BIAS),
    derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # old Llama checkpoints carry them
)

MISTRAL = _dense(
    name="mistral",
    title="Mistral",
    architecture="MistralForCausalLM",
    needs=_KV_HEADS,
    defaults={"sliding_window": 4096},
    windowed=lambda layer, config: True,
)


def _behind_full_layers(layer: int, config: Config) -> bool:
    return layer >= int(config.get("max_window_layers") or 0)


QWEN2 = _dense(
    name="qwen2",
    title="Qwen2, Qwen2.5",
    architecture="Qwen2ForCausalLM",
    fixed={"qkv_bias": True},
    needs=_KV_HEADS,
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    windowed=_behind_full_layers,
    window_switch="use_sliding_window",
    layer_types=True,
)

QWEN3 = _dense(
    name="qwen3",
    title="Qwen3 (dense)",
    architecture="Qwen3ForCausalLM",
    fixed={"qk_norm": True},
    keys=(ATTENTION_BIAS,),
    needs=_KV_HEADS,
    defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    windowed=_behind_full_layers,
    window_switch="use_sliding_window",
    layer_types=True,
)

OLMO2 = _dense(
    name="olmo2",
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    fixed={"norms": "post", "wide_qk_norm": True},
    keys=(ATTENTION_BIAS,),
    defaults={"rms_norm_eps": 1e-5},
)

OLMO3 = _dense(
    name="olmo3",
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    fixed={"norms": "post", "wide_qk_norm": True},
    keys=(ATTENTION_BIAS,),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    rope_theta=500_000.0,
    windowed=lambda layer, config: (layer + 1) % 4 != 0,
    layer_types=True,
    local_rope="same theta",
)


def _fused_layer(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """q, k, v and gate, up of a layer; each triple and pair is one tensor in files."""
    stored = {"attention_in": "self_attn.qkv_proj.weight", "mlp_in": "mlp.gate_up_proj.weight"}
    for parameter in layer_parameters(spec):
        yield replace(parameter, stored=stored.get(parameter.kind, ""))


PHI3 = _dense(
    name="phi3",
    title="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    architecture="Phi3ForCausalLM",
    layer=_fused_layer,
    harmless=("original_max_position_embeddings",),
    defaults={"rms_norm_eps": 1e-5},
    windowed=lambda layer, config: True,
    ropes=("default", "longrope"),
    rope_names={"su": "longrope"},
    partial_rotary=True,
)

GRANITE_MULTIPLIERS = (
    ConfigKey("embedding_multiplier", ("embedding_multiplier",), 1.0),
    ConfigKey("residual_multiplier", ("residual_multiplier",), 1.0),
    ConfigKey("attention_multiplier", ("attention_scale",), 1.0),
    ConfigKey("logits_scaling", ("logit_divisor",), 1.0),
)

GRANITE = _dense(
    name="granite",
    title="Granite 3, 3.1, 3.3 (dense)",
    architecture="GraniteForCausalLM",
    keys=(ATTENTION_BIAS, _MLP_BIAS, *GRANITE_MULTIPLIERS),
)


def _as_in_file(number: float) -> float:
    return int(number) if number == int(number) else number


_QUERY_SCALAR = ConfigKey(
    "query_pre_attn_scalar",
    ("attention_scale",),
    256,
    read=lambda scalar: scalar**-0.5,
    write=lambda scale: _as_in_file(round(scale**-2, 6)) if scale else None,
    written=True,
)
_LOGIT_SOFTCAP = "final_logit_softcapping"


def bound(key: str, field: str, default: float | None = None, *, written: bool = True) -> ConfigKey:
    """A key with the largest size of some numbers; null, and 0 in the spec: they have none."""
    return ConfigKey(
        key,
        (field,),
        default,
        read=lambda value: value or 0.0,
        write=lambda value: value or None,
        written=written,
        nullable=True,
    )


_GEMMA: dict[str, Any] = {
    "sized": lambda config: {"embedding_multiplier": config["hidden_size"] ** 0.5},
    "only": {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
    "harmless": ("hidden_act", "cache_implementation", "sliding_window_pattern", "_sliding_window_pattern"),
    "needs": _KV_HEADS,
    "layer_types": True,
}
_GEMMA_FIELDS = {"norms": "sandwich", "norm_plus_one": True, "activation": "gelu_tanh"}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}

GEMMA2 = _dense(
    name="gemma2",
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    fixed=_GEMMA_FIELDS,
    keys=(
        ATTENTION_BIAS,
        _QUERY_SCALAR,
        bound("attn_logit_softcapping", "attention_softcap", 50.0),
        bound(_LOGIT_SOFTCAP, "logit_softcap", 30.0),
    ),
    defaults=_GEMMA_DEFAULTS,
    windowed=lambda layer, config: (layer + 1) % 2 != 0,
    **_GEMMA,
)

GEMMA3 = _dense(
    name="gemma3_text",
    title="Gemma 3 (text)",
    architecture="Gemma3ForCausalLM",
    fixed={**_GEMMA_FIELDS, "qk_norm": True},
    keys=(ATTENTION_BIAS, _QUERY_SCALAR, bound(_LOGIT_SOFTCAP, "logit_softcap", None)),
    defaults={**_GEMMA_DEFAULTS, "rope_local_base_freq": 10_000.0},
    rope_theta=1_000_000.0,
    windowed=lambda layer, config: (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0,
    local_rope="theta",
    surplus_tokens=("<image_soft_token>",),  # of its relatives that see images
    **_GEMMA,
)

DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, PHI3, GRANITE, GEMMA2, GEMMA3)
