"""Odd configurations of every family, as transformers' own config classes take them."""

from __future__ import annotations

import random
from typing import Any

LENGTH = 24  # tokens of a text; windows are shorter
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    _LLAMA3,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    _YARN,
    _YARN | {"attention_factor": 1.25, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
)
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi3": "Phi3",
    "granite": "Granite",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
    "granitemoe": "GraniteMoe",
}


def odd_config(family: str, seed: int) -> dict[str, Any]:
    """Arguments of a family's config class: odd sizes, groups of heads, tied or not, biases, windows shorter than a text."""
    pick = random.Random(f"{family} {seed}")
    kv_heads, group, head_dim = pick.choice((1, 2, 3)), pick.choice((1, 2, 3)), pick.choice((8, 12, 16))
    heads = kv_heads * group
    own_size = family in ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "qwen3_moe")
    config: dict[str, Any] = {
        "vocab_size": pick.randrange(50, 120),
        "hidden_size": heads * (pick.choice((6, 8, 10)) if own_size else head_dim),
        "intermediate_size": pick.randrange(20, 50),
        "num_hidden_layers": pick.randrange(1, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": pick.choice((1e-5, 1e-6)),
        "tie_word_embeddings": pick.random() < 0.5,
        "rope_parameters": pick.choice(_ROPES) | {"rope_theta": pick.choice((10_000.0, 500_000.0))},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if own_size:
        config["head_dim"] = head_dim
    return config | _own(family, config, pick)


def _own(family: str, config: dict[str, Any], pick: random.Random) -> dict[str, Any]:
    bias, window = {"attention_bias": pick.random() < 0.5}, pick.choice((1, 2, 5, 16, 23, None))
    layers = config["num_hidden_layers"]
    types = [pick.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    match family:
        case "llama":
            return bias | {"mlp_bias": pick.random() < 0.5}
        case "mistral":
            return {"sliding_window": window}
        case "qwen2" | "qwen3":
            how = {"sliding_window": window, "use_sliding_window": window is not None}
            return how | {"max_window_layers": pick.randrange(layers + 1)} | (bias if family == "qwen3" else {})
        case "olmo2":
            return bias
        case "olmo3":
            full = pick.choice(({"rope_type": "default"}, _YARN)) | {"rope_theta": 500_000.0}
            local = {"rope_type": "default", "rope_theta": 500_000.0}
            ropes = {"full_attention": full, "sliding_attention": local}
            return bias | {"sliding_window": window or 3, "layer_types": types, "rope_parameters": ropes}
        case "phi3":
            return {"sliding_window": window} | _phi_rope(config, pick)
        case "granite":
            return bias | {"mlp_bias": pick.random() < 0.5} | _granite(pick)
        case "qwen3_moe":
            windows = {"sliding_window": window, "use_sliding_window": window is not None}
            return bias | windows | _experts(pick, "num_experts") | _sparse_layers(layers, pick)
        case "olmoe":
            clip = {"clip_qkv": pick.choice((None, 0.4)), "norm_topk_prob": pick.random() < 0.5}
            return bias | clip | _experts(pick, "num_experts")
        case "granitemoe":
            return bias | _granite(pick) | _experts(pick, "num_local_experts")
        case _:
            return bias | {"sliding_window": window or 3, "layer_types": types} | _gemma(family, config, pick)


def _granite(pick: random.Random) -> dict[str, Any]:
    return {
        "embedding_multiplier": pick.choice((1.0, 12.0)),
        "residual_multiplier": pick.choice((1.0, 0.22)),
        "attention_multiplier": pick.choice((0.125, 0.3)),
        "logits_scaling": pick.choice((1.0, 8.0)),
    }


def _experts(pick: random.Random, key: str) -> dict[str, Any]:
    experts = pick.choice((2, 5, 16))
    return {key: experts, "num_experts_per_tok": pick.choice((1, 2, experts))}


def _sparse_layers(layers: int, pick: random.Random) -> dict[str, Any]:
    """Inner sizes, and layers without experts, of which some are left."""
    step = pick.choice((1, 1, 2)) if layers > 1 else 1
    listed = [0] if layers > 2 and pick.random() < 0.5 else []
    own = {"moe_intermediate_size": pick.randrange(6, 20), "norm_topk_prob": pick.random() < 0.5}
    return own | {"mlp_only_layers": listed, "decoder_sparse_step": step}


def _phi_rope(config: dict[str, Any], pick: random.Random) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    share = pick.choice((1.0, 0.5)) if head_dim % 4 == 0 else 1.0
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    if pick.random() < 0.5:
        return {"rope_parameters": rope}
    count = int(head_dim * share) // 2
    factors = {f"{which}_factor": [pick.uniform(1.0, 4.0) for _ in range(count)] for which in ("short", "long")}
    return {"rope_parameters": rope | {"rope_type": "longrope"} | factors, "original_max_position_embeddings": 32}


def _gemma(family: str, config: dict[str, Any], pick: random.Random) -> dict[str, Any]:
    own: dict[str, Any] = {
        "query_pre_attn_scalar": pick.choice((8, 24, 168)),
        "final_logit_softcapping": pick.choice((None, 3.0)),
    }
    if family == "gemma2":
        return own | {"attn_logit_softcapping": pick.choice((None, 2.0)), "rope_parameters": config["rope_parameters"]}
    full = pick.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0})) | {"rope_theta": 1e6}
    return own | {
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        }
    }
