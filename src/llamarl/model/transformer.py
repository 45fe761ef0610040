"""The one transformer of all families (`families/`), in plain PyTorch.

It knows nothing of parallelism, caches or masks. Attention is a function passed by the caller: the trainer's masks
documents, the generator's reads and writes its KV cache. Parameters have their Hugging Face names, so checkpoints and
publications need no renaming. `fuse` joins parameters that read the same input into one matrix, of which they become views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from llamarl.families.decoder import NORM_NAMES
from llamarl.model.experts import ExpertMLP, OwnChoice
from llamarl.model.linear import JoinedLinear, Product, joined
from llamarl.model.ops import (
    ACTIVATIONS,
    Rope,
    Stream,
    add_projection,
    narrowed,
    rms_norm,
    rotate,
    scores,
    settled,
    softcapped,
)
from llamarl.model.plain_attention import causal_mask, masked_attention
from llamarl.model.rope import rope_table
from llamarl.model.spread import local_part
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions, ModelSpec

if TYPE_CHECKING:
    from llamarl.model.lora import Adapters

# attend(layer, q_BTHD, k_BTKD, v_BTKD) -> out_BTHD, with K key-value heads for H query heads. Queries and keys are already
# rotated to their positions, unless `attend.rotates` says that it does so itself. Layers whose attention is not plain pass
# their `AttentionOptions` as a fifth argument.
Attend = Callable[..., Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Stream) -> Tensor:
        return rms_norm(x, self.factors(), self.eps, plus_one=self.plus_one)

    def factors(self) -> Tensor:
        """The weight, in the precision of the result."""
        return self.weight


class AllHeadsNorm(RMSNorm):
    """RMS norm over all heads of queries or of keys. Where ranks share the heads, `sum_over_ranks` completes the sums of
    squares, and `size` is that of all ranks."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.size = size
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Stream) -> Tensor:
        if self.sum_over_ranks is None:
            return super().forward(x)
        wide = settled(x).float()
        mean = self.sum_over_ranks(wide.pow(2).sum(-1, keepdim=True)) / self.size
        factors = local_part(self.factors())
        return narrowed(factors * (wide * torch.rsqrt(mean + self.eps)), factors.dtype)


class StreamInput(nn.Module):
    """The residual stream as products take it, where no norm stands before them: in the precision of the weights."""

    def forward(self, x: Stream, dtype: torch.dtype) -> Any:
        return narrowed(settled(x), dtype)


class Attention(nn.Module):
    def __init__(self, shape: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=shape.out_bias)
        self.q_norm = _head_norm(shape) if shape.qk_norm else nn.Identity()
        self.k_norm = _head_norm(shape) if shape.qk_norm else nn.Identity()
        if shape.wide_qk_norm:
            self.q_norm, self.k_norm = (AllHeadsNorm(size, shape.norm_eps) for size in (q_size, kv_size))
        self.norms_all_heads, self.clip = shape.wide_qk_norm, shape.clip_qkv
        self.options = shape.attention_of(layer)  # None: plain attention
        self.rope_at = self.options.rope if self.options else 0
        self.fused: Product | None = None  # q, k and v as one product; see `fuse`

    def forward(self, x_BTC: Tensor, rope: Rope | None, attend: Attend, residual: Stream) -> Stream:
        q, k, v_BTKD = (part.view(*part.shape[:2], -1, self.head_dim) for part in self._normed(self._project(x_BTC)))
        q_BTHD, k_BTKD = (q, k) if self.norms_all_heads else (self.q_norm(q), self.k_norm(k))
        if rope is not None:
            rope = rope[self.rope_at : self.rope_at + 2]
            q_BTHD, k_BTKD = rotate(q_BTHD, rope), rotate(k_BTKD, rope)
        if self.options is None:
            out_BTHD = attend(self.layer, q_BTHD, k_BTKD, v_BTKD)
        else:
            out_BTHD = attend(self.layer, q_BTHD, k_BTKD, v_BTKD, self.options)
        return add_projection(residual, self.o_proj, out_BTHD.flatten(2))

    def _normed(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Queries, keys and values, with norms that span all heads, and bounded."""
        q, k, v = parts
        parts = (self.q_norm(q), self.k_norm(k), v) if self.norms_all_heads else parts
        return tuple(part.clamp(-self.clip, self.clip) for part in parts) if self.clip else parts

    def _project(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        if self.fused is None:
            return self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        sizes = [len(part.weight) for part in (self.q_proj, self.k_proj, self.v_proj)]
        return torch.split(self.fused(x_BTC), sizes, dim=-1)


def _head_norm(shape: ModelSpec) -> RMSNorm:
    return RMSNorm(shape.head_dim, shape.norm_eps, plus_one=shape.norm_plus_one)


class MLP(nn.Module):
    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)
        self.fused: Callable[[Any], Any] | None = None  # gate and up as one product, in this order; see `fuse`
        self.gated, activate = ACTIVATIONS[shape.activation]
        self.activate: Callable[[Tensor], Any] = activate  # makes the input of `down_proj`

    def forward(self, x: Tensor, residual: Stream) -> Stream:
        if self.fused is None:
            inner = self.gated(self.gate_proj(x), self.up_proj(x))
        else:
            inner = self.activate(self.fused(x))
        return add_projection(residual, self.down_proj, inner)


def _mlp(shape: ModelSpec, layer: int) -> MLP | ExpertMLP:
    return ExpertMLP(shape) if shape.has_experts(layer) else MLP(shape)


class Block(nn.Module):
    def __init__(self, shape: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, plus_one=shape.norm_plus_one)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, plus_one=shape.norm_plus_one)
        self.mlp = _mlp(shape, layer)

    def forward(self, x: Stream, rope: Rope | None, attend: Attend) -> Stream:
        x = self.self_attn(self.input_layernorm(x), rope, attend, residual=x)
        out: Stream = self.mlp(self.post_attention_layernorm(x), residual=x)
        return out

    @property
    def norm_dtype(self) -> torch.dtype:
        """Type of the norms' weights, which is that of the input of products."""
        return self.input_layernorm.weight.dtype


class ExpertBlock(Block):
    """A block whose MLP is a mixture of experts. With `routes`, its tokens take these experts instead of choosing; with
    `report`, it also returns what its router chooses (see `ExpertMLP.forward`)."""

    mlp: ExpertMLP

    def forward(  # type: ignore[override]
        self,
        x: Stream,
        rope: Rope | None,
        attend: Attend,
        routes_BTK: Tensor | None = None,
        report: bool = False,
        counted_BT: Tensor | None = None,
    ) -> Stream | tuple[Stream, OwnChoice]:
        x = self.self_attn(self.input_layernorm(x), rope, attend, residual=x)
        out: Stream | tuple[Stream, OwnChoice]
        out = self.mlp(self.post_attention_layernorm(x), x, routes_BTK, report, counted_BT)
        return out


class BranchBlock(nn.Module):
    """A block that does something to the results of attention and MLP before it adds them to the residual stream: a norm
    (OLMo 2, Gemma), a factor (Granite), or both. Attention and MLP may have norms before them, too."""

    def __init__(self, shape: ModelSpec, layer: int) -> None:
        super().__init__()
        self.norm_names, self.multiplier = NORM_NAMES[shape.norms], shape.residual_multiplier
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        self._add_norm(before_attention, shape)
        self.self_attn = Attention(shape, layer)
        self._add_norm(after_attention, shape)
        self._add_norm(before_mlp, shape)
        self.mlp = _mlp(shape, layer)
        self._add_norm(after_mlp, shape)
        self.stream_input = StreamInput()

    def _add_norm(self, name: str, shape: ModelSpec) -> None:
        if name:
            setattr(self, name, RMSNorm(shape.hidden_size, shape.norm_eps, plus_one=shape.norm_plus_one))

    def forward(self, x: Stream, rope: Rope | None, attend: Attend) -> Stream:
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        stream = settled(x)
        nothing = torch.zeros_like(stream)
        branch = self.self_attn(self._input(stream, before_attention), rope, attend, residual=nothing)
        stream = self._add(stream, branch, after_attention)
        branch = self.mlp(self._input(stream, before_mlp), residual=torch.zeros_like(stream))
        return self._add(stream, branch, after_mlp)

    def _input(self, stream: Tensor, norm: str) -> Any:
        """The input of attention or MLP."""
        return getattr(self, norm)(stream) if norm else self.stream_input(stream, self.norm_dtype)

    def _add(self, stream: Tensor, branch: Stream, norm: str) -> Tensor:
        out: Tensor = getattr(self, norm)(branch) if norm else settled(branch)
        return stream + (out if self.multiplier == 1.0 else self.multiplier * out)

    @property
    def norm_dtype(self) -> torch.dtype:
        """Type of the norms' weights, which is that of the input of products."""
        first: RMSNorm = getattr(self, next(filter(None, self.norm_names)))
        return first.weight.dtype


class ExpertBranchBlock(BranchBlock):
    """The same with a mixture of experts; see `ExpertBlock`."""

    mlp: ExpertMLP

    def forward(  # type: ignore[override]
        self,
        x: Stream,
        rope: Rope | None,
        attend: Attend,
        routes_BTK: Tensor | None = None,
        report: bool = False,
        counted_BT: Tensor | None = None,
    ) -> Stream | tuple[Stream, OwnChoice]:
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        stream = settled(x)
        branch = self.self_attn(self._input(stream, before_attention), rope, attend, residual=torch.zeros_like(stream))
        stream = self._add(stream, branch, after_attention)
        found = self.mlp(self._input(stream, before_mlp), torch.zeros_like(stream), routes_BTK, report, counted_BT)
        if not report:
            return self._add(stream, found, after_mlp)
        branch, chosen = found
        return self._add(stream, branch, after_mlp), chosen


def input_norms(block: Block | BranchBlock) -> list[RMSNorm]:
    """The norms whose results products take."""
    if isinstance(block, Block):
        return [block.input_layernorm, block.post_attention_layernorm]
    return [getattr(block, name) for name in block.norm_names[::2] if name]


def _block(shape: ModelSpec, layer: int) -> Block | BranchBlock:
    plain = shape.norms == "pre" and shape.residual_multiplier == 1.0
    if shape.has_experts(layer):
        return ExpertBlock(shape, layer) if plain else ExpertBranchBlock(shape, layer)
    return Block(shape, layer) if plain else BranchBlock(shape, layer)


class Decoder(nn.Module):
    """Embedding, blocks and final norm; Hugging Face calls it `model`."""

    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_block(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, plus_one=shape.norm_plus_one)


class Transformer(nn.Module):
    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.head_rows, bias=False)
        if shape.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.gather: Callable[[Tensor], Tensor] = lambda part: (
            part
        )  # joins the scores of a head that is split over ranks
        self.adapters: Adapters | None = None  # its LoRA adapters; see `lora.py`

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        attend: Attend,
        rope: Rope | None = None,
        *,
        routes: Tensor | None = None,
        chosen: Tensor | None = None,
        shortfall: Tensor | None = None,
        counted: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states [B, T, C]; `logits` turns them into scores.

        `rope` is the table of these positions, for callers that already have it. In a model with experts, `routes` are the
        ids of the experts that each token takes in each layer that has some [tokens, expert layers, k], instead of those
        that the model would choose; a token whose ids are negative chooses. `chosen` is memory of the same shape, of any type
        of integers, for the ids that it chooses, whether it takes them or not, and `shortfall` memory [tokens, expert layers]
        for how far the experts of `routes` are behind them (`experts.shortfall`). `probs` is memory [expert layers, experts]
        for the probabilities of its routers, summed over tokens where `counted` [B, T] is 1; gradients go through it.
        """
        x_BTC: Tensor = self.model.embed_tokens(tokens_BT).float()
        if self.shape.embedding_multiplier != 1.0:
            x_BTC = x_BTC * self.shape.embedding_multiplier
        if not getattr(attend, "rotates", False):
            rope = rope or rope_table(self.shape, positions_BT)
        stream: Stream = x_BTC
        if self.shape.experts:
            stream = self._through_experts(stream, rope, attend, routes, chosen, shortfall, counted, probs)
        else:
            for block in self.model.layers:
                stream = block(stream, rope, attend)
        hidden: Tensor = self.model.norm(stream)
        return hidden

    def _through_experts(
        self,
        stream: Any,
        rope: Rope | None,
        attend: Attend,
        routes: Tensor | None,
        chosen: Tensor | None,
        shortfall: Tensor | None,
        counted: Tensor | None,
        probs: Tensor | None,
    ) -> Stream:
        rows, place = stream.shape[:2], 0
        for block in self.model.layers:
            if not isinstance(block, ExpertBlock | ExpertBranchBlock):
                stream = block(stream, rope, attend)
                continue
            given = None if routes is None else routes[:, place].view(*rows, -1)
            if chosen is None:
                stream = block(stream, rope, attend, given)
            else:
                more = () if counted is None else (counted,)
                stream, own = block(stream, rope, attend, given, True, *more)
                chosen[:, place].copy_(own.ids_BTK.flatten(0, 1))
                if shortfall is not None and own.shortfall_BT is not None:
                    shortfall[:, place].copy_(own.shortfall_BT.flatten())
                if probs is not None:
                    probs[place].copy_(own.probs_E)
            place += 1
        return cast(Stream, stream)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 scores over the vocabulary."""
        found = self.gather(scores(hidden, self.lm_head.weight))
        if self.shape.logit_divisor != 1.0:
            found = found / self.shape.logit_divisor
        return softcapped(found, self.shape.logit_softcap)


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


def causal_attention(
    layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions = PLAIN_ATTENTION
) -> Tensor:
    """Plain causal attention over each row, for whole sequences that start at position 0."""
    return masked_attention(q_BTHD, k_BTKD, v_BTKD, causal_mask(q_BTHD, options), options)
