"""Model specs: the sizes and switches that fix a transformer's maths, and those of well-known models by name.

No torch here, so plans and `--help` start at once. `families/` lists the parameters of a spec.
"""

from __future__ import annotations

import difflib

from msgspec import Struct
from msgspec.structs import replace

from llamarl.errors import InputError


class RopeScaling(Struct, frozen=True, kw_only=True):
    """Llama 3.1's scaling of rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


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
    norm_eps: float = 1e-5
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    family: str = "llama"  # whose table of parameters it has (families/)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"model shape: {name} must be at least 1, is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model shape: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(f"model shape: head_dim must be even (rotary pairs), is {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


_LLAMA_3_1 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
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
    )


SHAPES: dict[str, ModelSpec] = {
    "smollm2-135m": ModelSpec(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rope_theta=100_000.0,
        tied_head=True,
    ),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, small=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, small=True),
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28_672, 80, 64),
    "llama-3.1-405b": _llama3(16_384, 53_248, 126, 128),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18_944, 28, 28, 4, vocab=152_064, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
}


def shape_named(name: str) -> ModelSpec:
    try:
        return SHAPES[name]
    except KeyError:
        near = difflib.get_close_matches(name, SHAPES, n=1)
        hint = f"; did you mean '{near[0]}'? Known" if near else "; known"
        raise InputError(f"--model: no model shape is named '{name}'{hint}: {', '.join(SHAPES)}") from None
