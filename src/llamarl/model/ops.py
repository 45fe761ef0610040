"""The small operations of the transformer, in plain PyTorch; on a GPU, inference runs their fused twins in `kernels.py`.

Each function here is what the kernel of the same name must compute: a CPU runs it, autograd differentiates it, and a GPU
test holds the kernel against it.

Precision, the same for trainer and generator so that their log-probs agree: the residual stream is fp32 and only products
take narrow operands. What lies between two products is computed in fp32 and rounded once, to the precision of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST_HALF = 65504.0
Rope = tuple[Tensor, Tensor]  # cos and sin in fp32, [B, T, 1, D]


def fused(x: Tensor) -> bool:
    """Kernels have no gradients, so they serve inference alone. Compiled code is asked first: it cannot ask for the mode."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In the precision of the weight, whatever that of x."""
    if fused(x):
        from llamarl.model import kernels

        return kernels.rms_norm(x, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return narrowed(weight * normed, weight.dtype)


def rotate(x_BTHD: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (i, i + D/2) of every head by the angle of its position."""
    if fused(x_BTHD):
        from llamarl.model import kernels

        return kernels.rotate(x_BTHD, rope)
    cos, sin = rope
    wide = x_BTHD.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BTHD.dtype)


def silu_times(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where the last dimension holds first all of gate, then all of up."""
    if fused(gate_up):
        from llamarl.model import kernels

        return kernels.silu_times(gate_up)
    return gated(*gate_up.chunk(2, dim=-1))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return narrowed(F.silu(gate.float()) * up.float(), gate.dtype)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is beyond the range of fp16 becomes its largest number; bf16 has the range of fp32."""
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).to(dtype) if dtype == torch.float16 else x.to(dtype)


def add_projection(residual: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    """residual + linear(x) in fp32; in inference on a GPU the sum is part of the product and overwrites the residual.
    A parallel layer has more to do, and a quantised one (`quantise.QuantisedLinear`) its own way."""
    add_to: Any = getattr(linear, "add_to", None)
    if fused(x) and add_to:
        add_to(residual, x)
        return residual
    plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter
    if plain and fused(x):
        from llamarl.model import kernels

        kernels.add_product(residual.flatten(0, -2), x.flatten(0, -2), linear.weight)
        return residual
    if plain and x.is_cuda and x.dtype != torch.float32:
        return residual + wide_product(x, linear.weight)
    out: Tensor = residual + linear(x)
    return out


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.t() of narrow operands, in fp32; differentiable."""
    out: Tensor = _WideProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients meet the weights in the precision of the weights, as those of any other product."""
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 products with every row of the head, whatever the precision of the inputs: a narrow head costs quality."""
    if fused(hidden) and weight.dtype != torch.float32:
        flat = hidden.flatten(0, -2)
        return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
    return F.linear(hidden.float(), weight.float())
