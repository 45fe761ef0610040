"""Model specs: the sizes and switches that fix a transformer's maths, and those of well-known models by name.

No torch here, so plans and `--help` start at once. `families/` lists the parameters of a spec.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from llamarl.errors import InputError


class Llama3Scaling(Struct, frozen=True, kw_only=True, tag="llama3"):
    """Llama 3.1's scaling of rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class LinearScaling(Struct, frozen=True, kw_only=True, tag="linear"):
    """All rotary frequencies divided by a factor."""

    factor: float


class DynamicScaling(Struct, frozen=True, kw_only=True, tag="dynamic"):
    """Frequencies that shrink while a sequence grows beyond the model's positions. Up to there nothing is scaled, and longer
    sequences are refused: a KV cache holds keys that were rotated by older frequencies."""

    factor: float


class YarnScaling(Struct, frozen=True, kw_only=True, tag="yarn"):
    """YaRN: low frequencies divided by a factor, high ones kept, a ramp in between."""

    factor: float
    original_max_positions: int
    attention_factor: float
    """Factor of cos and sin."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ends of the ramp are whole numbers."""


class LongScaling(Struct, frozen=True, kw_only=True, tag="longrope"):
    """LongRoPE (Phi-3): each frequency divided by a factor of its own. Sequences beyond the original positions would need the
    long factors for all of their tokens, also for those in the cache; so the model has the original positions only."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    """Factors of sequences beyond the original positions; not computed with, but kept for `config.json`."""
    attention_factor: float
    long_max_positions: int
    """Positions with the long factors."""


RopeScaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | LongScaling


class AttentionOptions(NamedTuple):
    """How the attention of one layer differs from the plain one."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    window: int = 0
    """Number of latest tokens that a token sees, itself included; 0: all before it."""
    softcap: float = 0.0
    """Bound of the scores, which become softcap * tanh(score / softcap); 0: none."""
    rope: int = 0
    """Place of its cos in the tables of rotations: 0, or 2 for those of layers with a window."""


PLAIN_ATTENTION = AttentionOptions()
Norms = Literal["pre", "post", "sandwich"]
Activation = Literal["silu", "gelu_tanh"]


class ModelSpec(Struct, frozen=True, kw_only=True):
    """Sizes and switches of one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float = 0.0
    """RoPE base of layers with a window, whose frequencies are not scaled; 0: they rotate as all others do."""
    rotary_dim: int = 0
    """Number of leading features of a head that are rotated; 0: all."""
    norm_eps: float = 1e-5
    norms: Norms = "pre"
    """Norms before attention and MLP, behind them (OLMo 2), or both (Gemma)."""
    norm_plus_one: bool = False
    """Whether norms multiply with 1 + weight (Gemma)."""
    activation: Activation = "silu"
    tied_head: bool = False
    value_head: bool = False
    """Whether the head is one row instead of a vocabulary: a score for each state (reward models, critics)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of queries and keys has a norm (Qwen3, Gemma 3)."""
    wide_qk_norm: bool = False
    """Whether all heads of queries together, and of keys, have a norm (OLMo 2)."""
    windows: tuple[int, ...] = ()
    """Number of latest tokens that a token of each layer sees; 0: all before it. Empty: no layer has a window."""
    attention_scale: float = 0.0
    """Factor of attention scores; 0: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_divisor: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    clip_qkv: float = 0.0
    """Bound of the elements of queries, keys and values (OLMoE); 0: none."""
    experts: int = 0
    """Number of experts of each MLP that is a mixture; 0: all MLPs are dense."""
    experts_per_token: int = 0
    """Number of experts that compute each token."""
    expert_size: int = 0
    """Inner size of one expert."""
    normalize_routes: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers whose MLP is dense, in a model with experts."""
    family: str = "llama"
    """Its table of parameters and `model_type` in config.json (families/)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"model shape: {name} must be at least 1, is {getattr(self, name)}")
        if self.value_head and self.tied_head:
            raise InputError("model shape: a head of one row cannot be tied to the embedding")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model shape: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(f"model shape: head_dim must be even (rotary pairs), is {self.head_dim}")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise InputError(f"model shape: {self.rotary_dim} of {self.head_dim} features of a head cannot be rotated")
        if self.windows and len(self.windows) != self.num_layers:
            raise InputError(f"model shape: {len(self.windows)} windows for {self.num_layers} layers")
        if self.experts and not (1 <= self.experts_per_token <= self.experts and self.expert_size >= 1):
            raise InputError(
                f"model shape: each token needs 1 to {self.experts} experts of size 1 or more, not "
                f"{self.experts_per_token} of size {self.expert_size}"
            )

    @property
    def head_rows(self) -> int:
        return 1 if self.value_head else self.vocab_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rotated_size(self) -> int:
        """Number of features of a head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def has_local_rope(self) -> bool:
        """Whether layers with a window rotate by frequencies of their own."""
        return self.local_rope_theta > 0 and any(self.windows)

    @property
    def has_dense_mlps(self) -> bool:
        """Whether the MLP of some layer is no mixture of experts."""
        return not self.experts or bool(self.dense_layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose MLP is a mixture of experts."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    @property
    def expert_share(self) -> float:
        """Share of the layers whose MLP is a mixture of experts."""
        return len(self.expert_layers) / self.num_layers if self.experts else 0.0

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def shared_sizes(self, ranks: int, expert: int = 1) -> tuple[tuple[str, int, int], ...]:
        """What tensor ranks must share evenly: name, size, and by how many ranks. Experts lie whole on `expert` parts of
        them."""
        heads = ("num_kv_heads", self.num_kv_heads, ranks), ("num_heads", self.num_heads, ranks)
        dense = (("intermediate_size", self.intermediate_size, ranks),) if self.has_dense_mlps else ()
        mixed = ("experts", self.experts, expert), ("expert_size", self.expert_size, ranks // expert)
        return *heads, *dense, *(mixed if self.expert_layers else ())

    @property
    def inner_units(self) -> float:
        """Number of inner units of a layer's MLP, or of a token's experts, that each token has; mean over the layers."""
        each = self.experts_per_token * self.expert_size
        return self._mean_over_layers(self.intermediate_size, each)

    def inner_rows(self, expert: int) -> float:
        """As `inner_units`, times `tensor` what a tensor rank has room for, where `expert` parts of the ranks hold different
        experts: rows of others' experts are not computed, but they are there, since who is chosen must not change a shape."""
        return self._mean_over_layers(self.intermediate_size, expert * self.experts_per_token * self.expert_size)

    def expert_rows(self, expert: int = 1) -> float:
        """The part of `inner_rows` that experts have; mean over the layers. 0 without experts."""
        return self._mean_over_layers(0, expert * self.experts_per_token * self.expert_size)

    @property
    def expert_copies(self) -> float:
        """Number of experts that each token is copied to in a layer; mean over the layers. 0 without experts."""
        return self._mean_over_layers(0, self.experts_per_token)

    def _mean_over_layers(self, dense: float, mixed: float) -> float:
        share = self.expert_share
        return share * mixed + (1 - share) * dense

    def used_experts(self, tokens: float) -> float:
        """Number of experts of a layer that so many tokens use, if they choose evenly and apart from one another."""
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens) if self.experts else 0.0

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def attention_of(self, layer: int) -> AttentionOptions | None:
        """How the attention of a layer differs from the plain one; None: not at all."""
        window = self.window_of(layer)
        options = AttentionOptions(
            self.attention_scale or None, window, self.attention_softcap, 2 if window and self.has_local_rope else 0
        )
        return None if options == PLAIN_ATTENTION else options

    def attended_share(self, length: float) -> float:
        """Share of the pairs of causal attention that its layers compute for documents of this length."""
        inside = [min(1.0, window / length) if window and length else 1.0 for window in self.windows]
        return sum(part * (2 - part) for part in inside) / len(inside) if inside else 1.0

    def cached_share(self, length: float) -> float:
        """Share of the cached tokens that a decode step of its layers reads, for sequences of this length."""
        inside = [min(1.0, window / length) if window and length else 1.0 for window in self.windows]
        return sum(inside) / len(inside) if inside else 1.0

    def splits_over(self, ranks: int, expert: int = 1) -> bool:
        """Whether tensor-parallel ranks can share its heads, its experts and the inner widths of its MLPs evenly."""
        return not any(size % parts for _, size, parts in self.shared_sizes(ranks, expert))


_LLAMA_3_1 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
_LLAMA_3_2 = replace(_LLAMA_3_1, factor=32.0)


def _llama3(hidden: int, ffn: int, layers: int, heads: int, *, head_dim: int = 128, small: bool = False) -> ModelSpec:
    return ModelSpec(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        max_positions=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA_3_2 if small else _LLAMA_3_1,
        tied_head=small,
    )


def _qwen2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, vocab: int, tied: bool) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=32_768,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tied_head=tied,
        qkv_bias=True,
        family="qwen2",
    )


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool) -> ModelSpec:
    return ModelSpec(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40_960,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        tied_head=tied,
        qk_norm=True,
        family="qwen3",
    )


def _mistral(
    hidden: int, ffn: int, layers: int, *, vocab: int, positions: int, theta: float, window: int = 0
) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=positions,
        rope_theta=theta,
        windows=(window,) * layers if window else (),
        family="mistral",
    )


def _smollm2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, theta: float) -> ModelSpec:
    return ModelSpec(
        vocab_size=49_152,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        max_positions=8192,
        rope_theta=theta,
        tied_head=True,
    )


def _sized(
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    positions: int,
    **more: Any,
) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=positions,
        **more,
    )


def _olmo2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> ModelSpec:
    how: dict[str, Any] = {
        "norms": "post",
        "wide_qk_norm": True,
        "family": "olmo2",
        "rope_theta": 500_000.0,
        "norm_eps": 1e-6,
    }
    return _sized(hidden, ffn, layers, heads, kv_heads, 128, 100_352, 4096, **how)


_GEMMA: dict[str, Any] = {
    "norms": "sandwich",
    "norm_plus_one": True,
    "activation": "gelu_tanh",
    "tied_head": True,
    "norm_eps": 1e-6,
}


def _gemma2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, head_dim: int, scalar: int) -> ModelSpec:
    return _sized(
        *(hidden, ffn, layers, heads, kv_heads, head_dim, 256_000, 8192),
        **_GEMMA,
        family="gemma2",
        windows=tuple(0 if layer % 2 else 4096 for layer in range(layers)),
        attention_scale=scalar**-0.5,
        attention_softcap=50.0,
        logit_softcap=30.0,
        embedding_multiplier=hidden**0.5,
    )


def _gemma3(hidden: int, ffn: int, layers: int) -> ModelSpec:
    return _sized(
        *(hidden, ffn, layers, 4, 1, 256, 262_144, 32_768),
        **_GEMMA,
        family="gemma3_text",
        qk_norm=True,
        windows=tuple(512 if (layer + 1) % 6 else 0 for layer in range(layers)),
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        attention_scale=256**-0.5,
        embedding_multiplier=hidden**0.5,
    )


def _olmoe() -> ModelSpec:
    return _sized(
        *(2048, 1024, 16, 16, 16, 128, 50_304, 4096),
        family="olmoe",
        wide_qk_norm=True,
        experts=64,
        experts_per_token=8,
        expert_size=1024,
    )


def _qwen3_moe(hidden: int, ffn: int, inner: int, layers: int, heads: int) -> ModelSpec:
    return _sized(
        *(hidden, ffn, layers, heads, 4, 128, 151_936, 40_960),
        family="qwen3_moe",
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        experts=128,
        experts_per_token=8,
        expert_size=inner,
        normalize_routes=True,
    )


def _granite_moe(hidden: int, inner: int, layers: int, heads: int, experts: int, scale: float) -> ModelSpec:
    return _sized(
        *(hidden, inner, layers, heads, 8, 64, 49_155, 131_072),
        family="granitemoe",
        rope_theta=1_500_000.0,
        norm_eps=1e-6,
        tied_head=True,
        attention_scale=scale,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logit_divisor=6.0,
        experts=experts,
        experts_per_token=8,
        expert_size=inner,
        normalize_routes=True,
    )


# Sizes as in each model's own config.json; Qwen2.5 and Qwen3 as in that of the chat model.
SHAPES: dict[str, ModelSpec] = {
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, theta=100_000.0),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5, theta=100_000.0),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, theta=130_000.0),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, small=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, small=True),
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28_672, 80, 64),
    "llama-3.3-70b": _llama3(8192, 28_672, 80, 64),
    "llama-3.1-405b": _llama3(16_384, 53_248, 126, 128),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocab=151_936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11_008, 36, 16, 2, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18_944, 28, 28, 4, vocab=152_064, tied=False),
    "qwen2.5-14b": _qwen2(5120, 13_824, 48, 40, 8, vocab=152_064, tied=False),
    "qwen2.5-32b": _qwen2(5120, 27_648, 64, 40, 8, vocab=152_064, tied=False),
    "qwen2.5-72b": _qwen2(8192, 29_568, 80, 64, 8, vocab=152_064, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, tied=False),
    "mistral-7b-v0.1": _mistral(4096, 14_336, 32, vocab=32_000, positions=32_768, theta=10_000.0, window=4096),
    "mistral-7b-v0.3": _mistral(4096, 14_336, 32, vocab=32_768, positions=32_768, theta=1_000_000.0),
    "mistral-nemo-12b": _mistral(5120, 14_336, 40, vocab=131_072, positions=128_000, theta=1_000_000.0),
    "mistral-small-24b": _mistral(5120, 32_768, 40, vocab=131_072, positions=32_768, theta=100_000_000.0),
    "olmo-2-1b": _olmo2(2048, 8192, 16, 16, 16),
    "olmo-2-7b": _olmo2(4096, 11_008, 32, 32, 32),
    "olmo-2-13b": _olmo2(5120, 13_824, 40, 40, 40),
    "olmo-2-32b": _olmo2(5120, 27_648, 64, 40, 8),
    "phi-3-mini-4k": _sized(3072, 8192, 32, 32, 32, 96, 32_064, 4096, family="phi3", windows=(2047,) * 32),
    "phi-4": _sized(5120, 17_920, 40, 40, 10, 128, 100_352, 16_384, family="phi3", rope_theta=250_000.0),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, head_dim=256, scalar=256),
    "gemma-2-9b": _gemma2(3584, 14_336, 42, 16, 8, head_dim=256, scalar=256),
    "gemma-2-27b": _gemma2(4608, 36_864, 46, 32, 16, head_dim=128, scalar=144),
    "gemma-3-270m": _gemma3(640, 2048, 18),
    "gemma-3-1b": _gemma3(1152, 6912, 26),
    "olmoe-1b-7b": _olmoe(),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12_288, 1536, 94, 64),
    "granite-3.1-1b-a400m": _granite_moe(1024, 512, 24, 16, 32, 0.015625),
}


def shape_named(name: str) -> ModelSpec:
    """The spec of a well-known model; upper case and the organization before a slash do not matter."""
    wanted = name.rpartition("/")[2].lower()
    if wanted in SHAPES:
        return SHAPES[wanted]
    raise InputError(f"--model: no model shape is named '{name}'; {_known_names(wanted)}")


def _known_names(wanted: str) -> str:
    """The names nearest to a wrong one, or all of them if none is near."""
    near = difflib.get_close_matches(wanted, SHAPES, n=4, cutoff=0.5)
    if not near:
        return f"known: {', '.join(SHAPES)}"
    others = f" Near it: {', '.join(near[1:])}" if near[1:] else ""
    return f"did you mean '{near[0]}'?{others}"
