"""Layers of a frozen base in fp8, for training the adapters beside them.

The forward pass computes what the generator computes: rows of the input are rounded to fp8 and multiplied with the very same
narrow weights. The backward pass takes rounding for the identity, and multiplies with the weights made wide again, one layer
at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llamarl.errors import ConfigError
from llamarl.families.adapters import adapted_layers
from llamarl.families.family import FP8_TILE
from llamarl.model.quantize import FP8, fp8_product, quantize_rows
from llamarl.model.transformer import Transformer


def take_narrow_base(model: Transformer) -> None:
    """Makes the layers whose weights are fp8 compute with them; to be called before adapters are added."""
    dtype = model.model.norm.weight.dtype
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear) and layer.weight.dtype == FP8:
            _check(layer.weight, dtype)
            layer.__class__ = NarrowLinear


def _check(weight_NK: Tensor, dtype: torch.dtype) -> None:
    if not weight_NK.is_cuda:
        return
    if dtype != torch.bfloat16:
        raise ConfigError("model.base: fp8 on a GPU needs trainer.dtype bfloat16")
    if any(size % FP8_TILE for size in weight_NK.shape):
        raise ConfigError(
            f"model.base: fp8 products on a GPU need sizes that are multiples of {FP8_TILE}; this model has one of "
            f"{tuple(weight_NK.shape)}"
        )


class NarrowLinear(nn.Linear):
    """A frozen layer whose weight is fp8, with a scale for each output in the buffer `weight_scale`."""

    weight_scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _NarrowProduct.apply(x, self.weight, self.weight_scale[:, 0])  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _NarrowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, scales_N: Tensor) -> Tensor:
        ctx.save_for_backward(weight_NK, scales_N)
        rows = quantize_rows(x.flatten(0, -2), FP8)
        return fp8_product(rows, (weight_NK, scales_N), None, x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight_NK, scales_N = ctx.saved_tensors
        wide_NK = (weight_NK.float() * scales_N[:, None]).to(grads[0].dtype)
        return grads[0] @ wide_NK, None, None


def through_fp8(x: Tensor) -> Tensor:
    """x as the narrow product sees it, in its own precision; for the adapters, whose input is that of the product."""
    out: Tensor = _Rounded.apply(x)  # type: ignore[no-untyped-call]
    return out


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values, scales = quantize_rows(x, FP8)
        return (values.float() * scales[..., None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def adapters_see_rounded(model: Transformer) -> None:
    """Adapters read the rounded input of their layer where the generator has no other: everywhere but behind attention."""
    assert model.adapters is not None
    for weight in adapted_layers(model.shape, model.adapters.lora):
        layer: Any = model.get_submodule(weight.module)
        if isinstance(layer, NarrowLinear) and weight.kind != "attention_out":
            layer.adapter_input = through_fp8  # type: ignore[assignment]
