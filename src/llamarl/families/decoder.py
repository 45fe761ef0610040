"""The parameters of a decoder-only transformer under their Hugging Face names. Which of them a model has depends on its spec.

Tensor parallelism cuts projections into heads or inner units by rows and projections out of them by columns; embedding and
head by vocabulary; norms stay whole, unless they span all heads. Query heads stay on one rank with the key-value head that
they read. Biases of projections out of heads or inner units are added once, to the sum over ranks, so they stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.families.family import COLUMNS, ROWS, ParameterSpec
from llamarl.model_spec import ModelSpec, Norms

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE = "score.weight"  # name of a head of one row in files
# Names of the norms before attention, behind it, before the MLP and behind it; empty: there is none.
NORM_NAMES: dict[Norms, tuple[str, str, str, str]] = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def before_layers(spec: ModelSpec) -> Iterator[ParameterSpec]:
    yield ParameterSpec(EMBEDDING, (spec.vocab_size, spec.hidden_size), "embedding", ROWS)


def after_layers(spec: ModelSpec) -> Iterator[ParameterSpec]:
    yield ParameterSpec("model.norm.weight", (spec.hidden_size,), "norm")
    if spec.value_head:
        yield ParameterSpec(HEAD, (1, spec.hidden_size), "head", stored=SCORE)
    else:
        yield ParameterSpec(HEAD, (spec.vocab_size, spec.hidden_size), "head", ROWS)


def layer_parameters(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Parameters of one layer, in the model's order."""
    before_attention, after_attention, before_mlp, after_mlp = NORM_NAMES[spec.norms]
    yield from _norm(spec, before_attention)
    yield from _attention(spec)
    yield from _norm(spec, after_attention)
    yield from _norm(spec, before_mlp)
    yield from _experts(spec) if spec.experts else _mlp(spec)
    yield from _norm(spec, after_mlp)


def _norm(spec: ModelSpec, name: str) -> Iterator[ParameterSpec]:
    if name:
        yield ParameterSpec(f"{name}.weight", (spec.hidden_size,), "norm")


def _attention(spec: ModelSpec) -> Iterator[ParameterSpec]:
    hidden, head = spec.hidden_size, spec.head_dim
    q, kv, group = spec.q_size, spec.kv_size, spec.q_size // spec.num_kv_heads
    for name, size, unit in (("q_proj", q, group), ("k_proj", kv, head), ("v_proj", kv, head)):
        copied = name != "q_proj"
        yield ParameterSpec(f"self_attn.{name}.weight", (size, hidden), "attention_in", ROWS, unit, copied)
        if spec.qkv_bias:
            yield ParameterSpec(f"self_attn.{name}.bias", (size,), "bias", ROWS, unit, copied)
    yield ParameterSpec("self_attn.o_proj.weight", (hidden, q), "attention_out", COLUMNS, group)
    if spec.out_bias:
        yield ParameterSpec("self_attn.o_proj.bias", (hidden,), "bias")
    if spec.qk_norm:
        yield ParameterSpec("self_attn.q_norm.weight", (head,), "head_norm")
        yield ParameterSpec("self_attn.k_norm.weight", (head,), "head_norm")
    if spec.wide_qk_norm:
        yield ParameterSpec("self_attn.q_norm.weight", (q,), "wide_norm", ROWS, group)
        yield ParameterSpec("self_attn.k_norm.weight", (kv,), "wide_norm", ROWS, head, copied=True)


def _mlp(spec: ModelSpec) -> Iterator[ParameterSpec]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    for name in ("gate_proj", "up_proj"):
        yield ParameterSpec(f"mlp.{name}.weight", (inner, hidden), "mlp_in", ROWS)
        if spec.mlp_bias:
            yield ParameterSpec(f"mlp.{name}.bias", (inner,), "bias", ROWS)
    yield ParameterSpec("mlp.down_proj.weight", (hidden, inner), "mlp_out", COLUMNS)
    if spec.mlp_bias:
        yield ParameterSpec("mlp.down_proj.bias", (hidden,), "bias")


def _experts(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """The router, which every rank holds, and all experts of a layer in two tensors: gate and up, and down. Tensor
    parallelism cuts the inner units of each expert."""
    hidden, inner, count = spec.hidden_size, spec.expert_size, spec.experts
    yield ParameterSpec("mlp.gate.weight", (count, hidden), "router")
    yield ParameterSpec("mlp.experts.gate_up_proj", (count, 2, inner, hidden), "expert_in", 2)
    yield ParameterSpec("mlp.experts.down_proj", (count, hidden, inner), "expert_out", 2)
