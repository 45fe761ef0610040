"""Products with quantized weights, for inference: fp8 (weights and what they multiply) or int8 (weights alone).

`quantize` makes a narrow copy of every matrix of the layers. Where new weights arrive wide, the wide ones are kept, and
`refresh` fills the copies again, in place, so that graphs captured over them stay valid. Where they arrive narrow, or never,
the narrow ones become the parameters, with their scales as `..._scale`, and the wide ones are freed. Every output of a
product has its own scale, and in fp8 every row of its input too. Embedding, norms and head are not quantized. Experts are
quantized as well, but not their inputs, in fp8 either: the router reads them in full precision.

What a GPU computes with `quantize_kernels.py` and `torch._scaled_mm` is also written here in plain PyTorch: a CPU runs it,
and a GPU test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from llamarl.errors import ConfigError
from llamarl.families.family import FP8_TILE
from llamarl.model.expert_products import Scales
from llamarl.model.experts import ExpertMLP, Experts, NarrowExperts
from llamarl.model.linear import JoinedLinear, ReplacedLinear, joined
from llamarl.model.ops import Residual, Stream, fused, silu_times
from llamarl.model.transformer import (
    MLP,
    Attention,
    Block,
    BranchBlock,
    RMSNorm,
    StreamInput,
    Transformer,
    input_norms,
    layers_of,
)

if TYPE_CHECKING:
    from llamarl.model import kernels

Quantization = Literal["none", "fp8", "int8"]

FP8 = torch.float8_e4m3fn
_LARGEST = {FP8: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = 1e-12  # of a row of zeros


Rows = tuple[Tensor, Tensor]  # quantized values, and a scale for every row


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Rows:
    """Each row divided by its scale, and the scales in fp32. The largest value of a row becomes the largest of the type."""
    if fused(x):
        from llamarl.model import quantize_kernels

        return quantize_kernels.quantize_rows(x, dtype)
    wide = x.float()
    scales = (wide.abs().amax(-1) / _LARGEST[dtype]).clamp(min=_SMALLEST_SCALE)
    scaled = (wide / scales[..., None]).clamp(-_LARGEST[dtype], _LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def fp8_product(x: Rows, weight: Rows, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """x @ weight.t() + bias of quantized rows, [M, K] and [N, K]."""
    (x_MK, x_scales_M), (weight_NK, scales_N) = x, weight
    if x_MK.is_cuda:
        return torch._scaled_mm(
            x_MK, weight_NK.t(), x_scales_M[:, None], scales_N[None], bias=bias, out_dtype=out, use_fast_accum=True
        )
    product_MN = (x_MK.float() @ weight_NK.float().t()) * x_scales_M[:, None] * scales_N
    return (product_MN if bias is None else product_MN + bias).to(out)


def int8_product(x_MK: Tensor, weight: Rows, bias: Tensor | None) -> Tensor:
    """x @ weight.t() + bias in the precision of x. The weights are whole numbers, which bf16 represents exactly."""
    if fused(x_MK):
        from llamarl.model import quantize_kernels

        return quantize_kernels.int8_product(x_MK, *weight, bias)
    weight_NK, scales_N = weight
    product_MN = (x_MK.float() @ weight_NK.float().t()) * scales_N
    return (product_MN if bias is None else product_MN + bias).to(x_MK.dtype)


class QuantizedWeight:
    """A narrow copy of a weight, and products with it."""

    def __init__(
        self, weight: Tensor | Rows, bias_N: Tensor | None, kind: Quantization, out_dtype: torch.dtype | None = None
    ) -> None:
        """A wide weight is quantized; a narrow one, whose products are to be of `out_dtype`, stays where it is."""
        self._dtype, self._bias_N = FP8 if kind == "fp8" else torch.int8, bias_N
        self._wide_NK: Tensor | None = None
        if isinstance(weight, Tensor):
            self._wide_NK, self._out_dtype = weight, weight.dtype
            self._values_NK = torch.empty_like(weight, dtype=self._dtype)
            self._scales_N = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        else:
            assert out_dtype is not None
            (self._values_NK, self._scales_N), self._out_dtype = weight, out_dtype
        _check(self._values_NK, self._out_dtype, kind)
        self._one = torch.ones((), dtype=torch.float32, device=self._values_NK.device)
        if self._wide_NK is not None:
            self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        assert self._wide_NK is not None, "it is what arrives"
        values_NK, scales_N = quantize_rows(self._wide_NK, self._dtype)
        self._values_NK.copy_(values_NK)
        self._scales_N.copy_(scales_N)

    def replace(self, layers: Sequence[nn.Linear]) -> None:
        """Replaces the weights of these layers, which it is the joined weight of, by the narrow values and their scales."""
        start = 0
        for layer in layers:
            end = start + len(layer.weight)
            layer.weight = nn.Parameter(self._values_NK[start:end], requires_grad=False)
            layer.register_buffer("weight_scale", self._scales_N[start:end, None])
            start = end
        self._wide_NK = None

    def terms(self, x: Tensor | Rows) -> kernels.Terms:
        """The product on a GPU, as terms for the residual stream. In fp8 the scales are applied only there, since products
        without scales are faster."""
        from llamarl.model.kernels import Terms

        if self._dtype != FP8:
            assert isinstance(x, Tensor)
            return Terms(self(x.flatten(0, -2))[None])
        values_MK, scales_M = _flat_rows(x)
        out_MN = torch._scaled_mm(
            values_MK, self._values_NK.t(), self._one, self._one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return Terms(out_MN[None], (scales_M, self._scales_N))

    def unscaled(self, x: Rows) -> Tensor | kernels.Terms:
        """The product without its scales on a GPU, for callers that apply them."""
        if not fused(x[0]):
            return self(x)
        from llamarl.model.kernels import Terms

        terms = self.terms(x)
        return Terms(terms.parts_PMN.view(1, *x[0].shape[:-1], -1), terms.scales)

    def __call__(self, x: Tensor | Rows) -> Tensor:
        weight = (self._values_NK, self._scales_N)
        if self._dtype == FP8:
            outer = (x[0] if isinstance(x, tuple) else x).shape[:-1]
            return fp8_product(_flat_rows(x), weight, self._bias_N, self._out_dtype).view(*outer, -1)
        assert isinstance(x, Tensor)
        return int8_product(x.flatten(0, -2), weight, self._bias_N).view(*x.shape[:-1], -1)


class QuantizedExperts:
    """Narrow copies of the matrices of a layer's experts, which their products take."""

    def __init__(self, experts: Experts, kind: Quantization, *, keep_wide: bool) -> None:
        self._dtype = FP8 if kind == "fp8" else torch.int8
        wide = experts.gate_up_proj.detach(), experts.down_proj.detach()
        (gate_up, of_gate_up), (down, of_down) = (self._rows(one) for one in wide)
        self._wide: tuple[Tensor, ...] = wide if keep_wide else ()
        self._narrow = experts.narrow = NarrowExperts(gate_up, down, Scales(of_gate_up, of_down))
        if not keep_wide:
            for name, values in (("gate_up_proj", gate_up), ("down_proj", down)):
                setattr(experts, name, nn.Parameter(values, requires_grad=False))

    def _rows(self, wide: Tensor) -> Rows:
        values, scales = quantize_rows(wide.flatten(0, -2), self._dtype)
        return values.view(wide.shape), scales.view(wide.shape[:-1])

    @torch.inference_mode()
    def refresh(self) -> None:
        assert self._wide and self._narrow.scales is not None, "it is what arrives"
        for wide, values, scales in zip(self._wide, self._narrow[:2], self._narrow.scales, strict=True):
            new_values, new_scales = self._rows(wide)
            values.copy_(new_values)
            scales.copy_(new_scales)


Narrow = QuantizedWeight | QuantizedExperts


def _flat_rows(x: Tensor | Rows) -> Rows:
    values, scales = x if isinstance(x, tuple) else quantize_rows(x, FP8)
    return values.flatten(0, -2), scales.flatten()


def _check(weight_NK: Tensor, out_dtype: torch.dtype, kind: Quantization) -> None:
    if not weight_NK.is_cuda:
        return
    if out_dtype != torch.bfloat16:
        raise ConfigError(f"generator.quantize: {kind} on a GPU needs generator.dtype bfloat16")
    if kind == "fp8" and any(size % FP8_TILE for size in weight_NK.shape):
        raise ConfigError(
            f"generator.quantize: fp8 products on a GPU need sizes that are multiples of {FP8_TILE}; "
            f"this model has one of {tuple(weight_NK.shape)}"
        )


class NarrowNorm(RMSNorm):
    """RMS norm with quantized output, for products that take fp8; one pass on a GPU."""

    def forward(self, x: Stream) -> Rows:  # type: ignore[override]
        if isinstance(x, Residual) or fused(x):
            from llamarl.model import quantize_kernels

            total, terms = (x.sum, x.take_terms()) if isinstance(x, Residual) else (x, None)
            return quantize_kernels.norm_rows(total, self.weight, self.eps, terms, plus_one=self.plus_one)
        return quantize_rows(super().forward(x), FP8)


class NarrowStreamInput(StreamInput):
    """The residual stream, quantized, for products that take fp8 and have no norm before them."""

    def forward(self, x: Stream, dtype: torch.dtype) -> Rows:
        return quantize_rows(super().forward(x, dtype), FP8)


def narrow_silu_times(gate_up: Tensor | kernels.Terms) -> Rows:
    """`silu_times` with quantized output, for a product that takes fp8. On a GPU it also applies the scales before it."""
    if isinstance(gate_up, Tensor):
        return quantize_rows(silu_times(gate_up), FP8)
    from llamarl.model import quantize_kernels

    return quantize_kernels.silu_rows(gate_up)


class NarrowActivation:
    """Another activation with quantized output, for a product that takes fp8."""

    def __init__(self, activate: Callable[[Tensor], Tensor]) -> None:
        self._activate = activate

    def __call__(self, gate_up: Tensor) -> Rows:
        return quantize_rows(self._activate(gate_up), FP8)


class QuantizedLinear(ReplacedLinear):
    def __init__(self, layer: nn.Linear, narrow: QuantizedWeight) -> None:
        super().__init__(layer)
        self.product, self.terms = narrow, narrow.terms


def quantize(model: Transformer, kind: Quantization, *, keep_wide: bool = True) -> list[Narrow]:
    """Quantizes a fused model. Returns the weights to refresh whenever wide weights have arrived."""
    if kind == "none":
        return []
    layers: Iterable[Any] = model.model.layers
    blocks = [block for block in layers if not isinstance(block.self_attn.fused, QuantizedWeight)]
    found = [narrow for block in blocks for narrow in quantize_block(block, kind, keep_wide=keep_wide)]
    if not keep_wide and model.lm_head.weight.is_cuda:
        torch.cuda.empty_cache()  # frees the memory of the wide weights
    return found if keep_wide else []


def quantize_block(block: Block | BranchBlock, kind: Quantization, *, keep_wide: bool) -> list[Narrow]:
    """Quantizes one fused block. Returns its narrow weights."""
    mlp: Any = block.mlp
    has_experts, norms = isinstance(mlp, ExpertMLP), input_norms(block)
    if kind == "fp8":
        assert not has_experts or len(norms) == 2, "experts have a norm of their own before them"
        for norm in norms[:1] if has_experts else norms:
            norm.__class__ = NarrowNorm
        if isinstance(block, BranchBlock):
            block.stream_input.__class__ = NarrowStreamInput
    dtype = block.norm_dtype
    found: list[Narrow] = [*_quantize_part(block.self_attn, kind, keep_wide, dtype)]
    if has_experts:
        return [*found, QuantizedExperts(mlp.experts, kind, keep_wide=keep_wide)]
    return [*found, *_quantize_part(mlp, kind, keep_wide, dtype)]


def _quantize_part(
    part: Attention | MLP, kind: Quantization, keep_wide: bool, dtype: torch.dtype
) -> Iterator[QuantizedWeight]:
    inputs, output = layers_of(part)
    layers, layer = [getattr(part, name) for name in inputs], getattr(part, output)
    assert isinstance(part.fused, JoinedLinear), "fuse the model first"
    is_narrow = layer.weight.dtype == FP8  # as it was read: see `base.py`
    joined_NK, out_NK = part.fused.weight, layer.weight
    whole = QuantizedWeight(_rows_of(joined_NK, layers) if is_narrow else joined_NK, part.fused.bias, kind, dtype)
    narrow = QuantizedWeight(_rows_of(out_NK, [layer]) if is_narrow else out_NK, None, kind, dtype)
    has_bias, part.fused = part.fused.bias is not None, whole
    if isinstance(part, MLP) and kind == "fp8":
        plain = part.activate is silu_times and not has_bias
        part.fused = whole.unscaled if plain else whole
        part.activate = narrow_silu_times if plain else NarrowActivation(part.activate)
    if isinstance(layer, ReplacedLinear):  # it is split over ranks and sums over them
        layer.product = narrow
    else:
        setattr(part, output, QuantizedLinear(layer, narrow))
    if not keep_wide and not is_narrow:
        whole.replace(layers)
        narrow.replace([getattr(part, output)])
    yield whole
    yield narrow


def _rows_of(values_NK: Tensor, layers: Sequence[Any]) -> Rows:
    return values_NK.detach(), joined([layer.weight_scale for layer in layers])[:, 0]
