"""The one transformer: Llama 2-3.2, Mistral, SmolLM2, Qwen2 and Qwen3, in plain PyTorch.

It knows nothing of parallelism, caches or masks. Attention is a function passed by the caller: the trainer's masks
documents, the generator's reads and writes its KV cache. Parameters have their Hugging Face names, so checkpoints and
publications need no renaming. `fuse` joins parameters that read the same input into one matrix, of which they become views.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llamarl.model.linear import JoinedLinear, Product, joined
from llamarl.model.ops import Rope, Stream, add_projection, gated, rms_norm, rotate, scores, silu_times
from llamarl.model_spec import ModelSpec

if TYPE_CHECKING:
    from llamarl.model.lora import Adapters

# attend(layer, q_BTHD, k_BTKD, v_BTKD) -> out_BTHD, with K key-value heads for H query heads. Queries and keys are already
# rotated to their positions, unless `attend.rotates` says that it does so itself.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Stream) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()

        self.fused: Product | None = None  # q, k and v as one product; see `fuse`

    def forward(self, x_BTC: Tensor, rope: Rope | None, attend: Attend, residual: Stream) -> Stream:
        q, k, v_BTKD = (part.view(*part.shape[:2], -1, self.head_dim) for part in self._project(x_BTC))
        q_BTHD, k_BTKD = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q_BTHD, k_BTKD = rotate(q_BTHD, rope), rotate(k_BTKD, rope)
        return add_projection(residual, self.o_proj, attend(self.layer, q_BTHD, k_BTKD, v_BTKD).flatten(2))

    def _project(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        if self.fused is None:
            return self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        sizes = [len(part.weight) for part in (self.q_proj, self.k_proj, self.v_proj)]
        return torch.split(self.fused(x_BTC), sizes, dim=-1)


class MLP(nn.Module):
    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.fused: Callable[[Any], Any] | None = None  # gate and up as one product, in this order; see `fuse`
        self.activate: Callable[[Tensor], Any] = silu_times  # makes the input of `down_proj`

    def forward(self, x: Tensor, residual: Stream) -> Stream:
        if self.fused is None:
            inner = gated(self.gate_proj(x), self.up_proj(x))
        else:
            inner = self.activate(self.fused(x))
        return add_projection(residual, self.down_proj, inner)


class Block(nn.Module):
    def __init__(self, shape: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Stream, rope: Rope | None, attend: Attend) -> Stream:
        x = self.self_attn(self.input_layernorm(x), rope, attend, residual=x)
        out: Stream = self.mlp(self.post_attention_layernorm(x), residual=x)
        return out


class Decoder(nn.Module):
    """Embedding, blocks and final norm; Hugging Face calls it `model`."""

    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class Transformer(nn.Module):
    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.gather: Callable[[Tensor], Tensor] = lambda part: (
            part
        )  # joins the scores of a head that is split over ranks
        self.adapters: Adapters | None = None  # its LoRA adapters; see `lora.py`

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, attend: Attend, rope: Rope | None = None) -> Tensor:
        """The last hidden states [B, T, C]; `logits` turns them into scores.

        `rope` is the table of these positions, for callers that already have it.
        """
        x_BTC: Tensor = self.model.embed_tokens(tokens_BT).float()
        if not getattr(attend, "rotates", False):
            rope = rope or rope_table(self.shape, positions_BT)
        stream: Stream = x_BTC
        for block in self.model.layers:
            stream = block(stream, rope, attend)
        hidden: Tensor = self.model.norm(stream)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 scores over the vocabulary."""
        return self.gather(scores(hidden, self.lm_head.weight))


def fuse(model: nn.Module) -> None:
    """Joins q, k, v and gate, up of every block that is not fused yet, in memory and in the product.

    The parameters keep their names, as views of the joined matrix: writing them changes what is computed. Those that lie one
    behind another in memory stay there.
    """
    for module in model.modules():
        if isinstance(module, Attention | MLP) and module.fused is None:
            module.fused = _join([getattr(module, name) for name in layers_of(module)[0]])


def layers_of(part: Attention | MLP) -> tuple[tuple[str, ...], str]:
    """Names of the layers that are joined, in this order, and of the layer behind them."""
    if isinstance(part, Attention):
        return ("q_proj", "k_proj", "v_proj"), "o_proj"
    return ("gate_proj", "up_proj"), "down_proj"


def _join(layers: list[nn.Linear]) -> JoinedLinear:
    return JoinedLinear(_join_named("weight", layers), None if layers[0].bias is None else _join_named("bias", layers))


def _join_named(name: str, layers: list[nn.Linear]) -> Tensor:
    whole, start = joined([getattr(layer, name).detach() for layer in layers]), 0
    for layer in layers:
        end = start + layer.weight.shape[0]
        setattr(layer, name, nn.Parameter(whole[start:end], requires_grad=False))
        start = end
    return whole


def rope_frequencies(shape: ModelSpec, device: torch.device | None = None) -> Tensor:
    """Rotary frequencies [D/2] in fp32, with Llama 3.1's scaling of the low ones where the spec has it."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.int64, device=device).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**steps)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rope_table(shape: ModelSpec, positions_BT: Tensor) -> Rope:
    """cos and sin for every position, [B, T, 1, D], in fp32."""
    angles = positions_BT[..., None].float() * rope_frequencies(shape, positions_BT.device)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def rope_up_to(shape: ModelSpec, length: int, device: torch.device | str) -> Rope:
    """cos and sin for all positions below `length`, [T, 1, D], for callers that look up theirs."""
    cos_1T1D, sin_1T1D = rope_table(shape, torch.arange(length, device=device)[None])
    return cos_1T1D[0], sin_1T1D[0]


def causal_attention(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
    """Plain causal attention over each row, for whole sequences that start at position 0."""
    out = F.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)
