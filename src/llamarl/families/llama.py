"""The table of the Llama family: Llama 2 to 3.2, Mistral, SmolLM2, Qwen2 (with biases) and Qwen3 (with norms of heads).

Tensor parallelism cuts projections into heads or inner units by rows and projections out of them by columns; embedding and
head by vocabulary; norms stay whole. Query heads stay on one rank with the key-value head that they read.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.families.family import COLUMNS, ROWS, Family, ParameterSpec
from llamarl.model_spec import ModelSpec

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _before(spec: ModelSpec) -> Iterator[ParameterSpec]:
    yield ParameterSpec(_EMBEDDING, (spec.vocab_size, spec.hidden_size), "embedding", ROWS)


def _layer(spec: ModelSpec) -> Iterator[ParameterSpec]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv, head, group = spec.q_size, spec.kv_size, spec.head_dim, spec.q_size // spec.num_kv_heads
    yield ParameterSpec("input_layernorm.weight", (hidden,), "norm")
    yield ParameterSpec("self_attn.q_proj.weight", (q, hidden), "attention_in", ROWS, group)
    if spec.qkv_bias:
        yield ParameterSpec("self_attn.q_proj.bias", (q,), "bias", ROWS, group)
    yield ParameterSpec("self_attn.k_proj.weight", (kv, hidden), "attention_in", ROWS, head, copied=True)
    if spec.qkv_bias:
        yield ParameterSpec("self_attn.k_proj.bias", (kv,), "bias", ROWS, head, copied=True)
    yield ParameterSpec("self_attn.v_proj.weight", (kv, hidden), "attention_in", ROWS, head, copied=True)
    if spec.qkv_bias:
        yield ParameterSpec("self_attn.v_proj.bias", (kv,), "bias", ROWS, head, copied=True)
    yield ParameterSpec("self_attn.o_proj.weight", (hidden, q), "attention_out", COLUMNS, group)
    if spec.qk_norm:
        yield ParameterSpec("self_attn.q_norm.weight", (head,), "head_norm")
        yield ParameterSpec("self_attn.k_norm.weight", (head,), "head_norm")
    yield ParameterSpec("post_attention_layernorm.weight", (hidden,), "norm")
    yield ParameterSpec("mlp.gate_proj.weight", (inner, hidden), "mlp_in", ROWS)
    yield ParameterSpec("mlp.up_proj.weight", (inner, hidden), "mlp_in", ROWS)
    yield ParameterSpec("mlp.down_proj.weight", (hidden, inner), "mlp_out", COLUMNS)


def _after(spec: ModelSpec) -> Iterator[ParameterSpec]:
    yield ParameterSpec("model.norm.weight", (spec.hidden_size,), "norm")
    yield ParameterSpec(_HEAD, (spec.vocab_size, spec.hidden_size), "head", ROWS)


LLAMA = Family(
    embedding=_EMBEDDING,
    head=_HEAD,
    before=_before,
    layer=_layer,
    after=_after,
    derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # old Llama checkpoints carry them
)
