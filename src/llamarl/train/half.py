"""fp16 operands for the products of the forward pass, over bf16 weights: applied to the model from outside.

Generator and trainer add in different orders, so each rounds by itself what enters a product, and the differences add up over
the layers. bf16 keeps 8 bits of a number, fp16 keeps 11: with fp16 on both sides the log-probs are several times nearer to
each other. Every bf16 weight is an fp16 number as well (but for those below 6e-5, whose last bits are lost): it is the same
model. Between two products everything is fp32 here, and what lies beyond fp16's range becomes its largest number.

The backward pass is that of bf16: gradients need its range, so that nobody has to scale a loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llamarl.model.ops import Stream, narrowed, rms_norm
from llamarl.model.transformer import MLP, Attention, RMSNorm, Transformer


def take_half_operands(model: Transformer) -> None:
    """Of the blocks; the head takes what the last norm gives it, in bf16."""
    for part in model.model.layers.modules():
        if isinstance(part, RMSNorm):
            part.__class__ = WideNorm
        elif isinstance(part, nn.Linear):
            part.__class__ = HalfLinear
    for part in model.model.layers.modules():
        if isinstance(part, Attention):
            part.o_proj.__class__ = WideLinear
        elif isinstance(part, MLP):
            part.down_proj.__class__ = WideLinear


class WideNorm(RMSNorm):
    """Not rounded: what reads it rounds to fp16."""

    def forward(self, x: Stream) -> Tensor:
        return rms_norm(x, self.weight.float(), self.eps)


class HalfLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _HalfProduct.apply(x, self.weight, False)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class WideLinear(HalfLinear):
    """Its result goes into the residual stream, which is fp32."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _HalfProduct.apply(x, self.weight, True)  # type: ignore[no-untyped-call]
        return out


class _HalfProduct(torch.autograd.Function):
    """fp32 in, fp32 out. Unless `wide`, the result is an fp16 number, so that it can be kept as one until it is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        half = to_half(x)
        ctx.save_for_backward(half, weight)
        flat, columns = half.flatten(0, -2), weight.to(torch.float16).t()
        out = torch.mm(flat, columns, out_dtype=torch.float32) if wide and x.is_cuda else torch.mm(flat, columns)
        return out.float().view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        half, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype)
        of_weight = grad.flatten(0, -2).t() @ half.flatten(0, -2).to(weight.dtype)
        return (grad @ weight).float(), of_weight, None


def to_half(x: Tensor) -> Tensor:
    return narrowed(x, torch.float16)


class HalfFlash(torch.autograd.Function):
    """FlashAttention over documents: fp16 forward, bf16 backward."""

    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts_D: Tensor, longest: int) -> Tensor:
        halves = tuple(to_half(x) for x in (q_THD, k_TKD, v_TKD))
        out, sums, random, unused, _ = torch.ops.aten._flash_attention_forward(
            *halves, starts_D, starts_D, longest, longest, 0.0, True, False
        )
        ctx.save_for_backward(*halves, out, sums, starts_D, random, unused)
        ctx.longest = longest
        wide: Tensor = out.float()
        return wide

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *halves, out, sums, starts_D, random, unused = ctx.saved_tensors
        narrow = [x.to(torch.bfloat16) for x in (grads[0], *halves, out)]
        found = torch.ops.aten._flash_attention_backward(
            *narrow, sums, starts_D, starts_D, ctx.longest, ctx.longest, 0.0, True, random, unused
        )
        return *(grad.float() for grad in found), None, None
