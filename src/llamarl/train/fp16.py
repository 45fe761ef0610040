"""fp16 operands for the products of the forward pass, with bf16 weights: applied to the model from outside.

Generator and trainer sum in different orders, so operands of products are rounded differently, and the differences add up
over the layers. bf16 keeps 8 bits of a number, fp16 keeps 11: with fp16 on both sides the log-probs are several times closer
to each other. Every bf16 weight is an fp16 number as well (except those below 6e-5, whose last bits are lost): it is the same
model. Between two products everything is fp32 here, and values beyond fp16's range become its largest number.

The backward pass is that of bf16: gradients need its range, so that no loss has to be scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llamarl.model.ops import Stream, narrowed, settled
from llamarl.model.transformer import MLP, AllHeadsNorm, Attention, RMSNorm, StreamInput, Transformer


def take_half_operands(model: Transformer) -> None:
    """Makes the layers of all blocks take fp16 operands; the head takes the output of the last norm in bf16."""
    for module in model.model.layers.modules():
        if isinstance(module, AllHeadsNorm):
            module.__class__ = WideAllHeadsNorm
        elif isinstance(module, RMSNorm):
            module.__class__ = WideNorm
        elif isinstance(module, StreamInput):
            module.__class__ = WideStreamInput
        elif isinstance(module, nn.Linear):
            module.__class__ = HalfLinear
    for module in model.model.layers.modules():
        if isinstance(module, Attention):
            module.o_proj.__class__ = WideLinear
        elif isinstance(module, MLP):
            module.down_proj.__class__ = WideLinear


class WideNorm(RMSNorm):
    """RMS norm in fp32; the layers that read it round to fp16."""

    def factors(self) -> Tensor:
        return self.weight.float()


class WideAllHeadsNorm(AllHeadsNorm):
    """The same for a norm that spans all heads."""

    def factors(self) -> Tensor:
        return self.weight.float()


class WideStreamInput(StreamInput):
    """The residual stream as it is; the layers that read it round to fp16."""

    def forward(self, x: Stream, dtype: torch.dtype) -> Tensor:
        return settled(x)


class HalfLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _HalfProduct.apply(x, self.weight, False)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class WideLinear(HalfLinear):
    """A layer whose result goes into the residual stream, which is fp32."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _HalfProduct.apply(x, self.weight, True)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _HalfProduct(torch.autograd.Function):
    """A product from fp32 to fp32. Unless `wide`, the result is rounded to fp16, so that it can be kept in fp16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        half = to_half(x)
        ctx.save_for_backward(half, weight)
        flat, columns = half.flatten(0, -2), weight.to(torch.float16).t()
        out = torch.mm(flat, columns, out_dtype=torch.float32) if wide and x.is_cuda else torch.mm(flat, columns)
        return out.float().view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        half, weight = ctx.saved_tensors
        grad, of_weight = grads[0].to(weight.dtype), None
        if ctx.needs_input_grad[1]:
            of_weight = grad.flatten(0, -2).t() @ half.flatten(0, -2).to(weight.dtype)
        return (grad @ weight).float(), of_weight, None


def to_half(x: Tensor) -> Tensor:
    return narrowed(x, torch.float16)


def flash_options(scale: float | None, window: int) -> dict[str, Any]:
    """Arguments of FlashAttention, beside its operands, for what is not plain. A window counts the token itself."""
    found: dict[str, Any] = {} if scale is None else {"scale": scale}
    return found | {"window_size_left": window - 1, "window_size_right": 0} if window else found


class HalfFlash(torch.autograd.Function):
    """FlashAttention over documents: fp16 forward, bf16 backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        longest_q: int,
        longest_k: int,
        scale: float | None,
        window: int,
    ) -> Tensor:
        options = flash_options(scale, window)
        halves = tuple(to_half(x) for x in (q_THD, k_TKD, v_TKD))
        out, sums, random, unused, _ = torch.ops.aten._flash_attention_forward(
            *halves, starts_q, starts_k, longest_q, longest_k, 0.0, True, False, **options
        )
        ctx.save_for_backward(*halves, out, sums, starts_q, starts_k, random, unused)
        ctx.longest, ctx.scale, ctx.window = (longest_q, longest_k), scale, window
        wide: Tensor = out.float()
        return wide

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *halves, out, sums, starts_q, starts_k, random, unused = ctx.saved_tensors
        narrow, options = [x.to(torch.bfloat16) for x in (grads[0], *halves, out)], flash_options(ctx.scale, ctx.window)
        found = torch.ops.aten._flash_attention_backward(
            *narrow, sums, starts_q, starts_k, *ctx.longest, 0.0, True, random, unused, **options
        )
        return *(grad.float() for grad in found), *[None] * 6
