"""The small operations of the transformer, in plain PyTorch; on a GPU, inference runs their fused twins in `kernels.py`.

Each function here is what the kernel of the same name must compute: a CPU runs it, autograd differentiates it, and a GPU
test holds the kernel against it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Rope = tuple[Tensor, Tensor]  # cos and sin, [B, T, 1, D]


def fused(x: Tensor) -> bool:
    """Kernels have no gradients, so they serve inference alone. Compiled code is asked first: it cannot ask for the mode."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if fused(x):
        from llamarl.model import kernels

        return kernels.rms_norm(x, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x_BTHD: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (i, i + D/2) of every head by the angle of its position."""
    if fused(x_BTHD):
        from llamarl.model import kernels

        return kernels.rotate(x_BTHD, rope)
    cos, sin = rope
    left, right = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos + torch.cat((-right, left), dim=-1) * sin


def silu_times(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where the last dimension holds first all of gate, then all of up."""
    if fused(gate_up):
        from llamarl.model import kernels

        return kernels.silu_times(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_projection(residual: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    """residual + linear(x); in inference on a GPU the sum is part of the product. A parallel layer has more to do."""
    if fused(x) and type(linear) is nn.Linear:
        return torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), linear.weight.t()).view(residual.shape)
    out: Tensor = residual + linear(x)
    return out


def scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 products with every row of the head, whatever the precision of the inputs: a narrow head costs quality."""
    if fused(hidden) and weight.dtype != torch.float32:
        flat = hidden.flatten(0, -2)
        return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
    return F.linear(hidden.float(), weight.float())
