"""The small operations of the transformer, in plain PyTorch; on a GPU, inference runs their fused versions in `kernels.py`.

Each function here is the reference for the kernel of the same name: a CPU runs it, autograd differentiates it, and a GPU test
compares the kernel with it.

Precision, the same for trainer and generator so that their log-probs agree: the residual stream is fp32, and only products
take narrow operands. Between two products, everything is computed in fp32 and rounded once, to the precision of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llamarl.model.gpu_paths import on_gpu
from llamarl.model.linear import ReplacedLinear
from llamarl.model_spec import Activation

if TYPE_CHECKING:
    from llamarl.model import kernels

LARGEST_HALF = 65504.0
Rope = tuple[Tensor, ...]  # cos and sin in fp32, [B, T, 1, D]; then those of layers that rotate apart (`rope.py`)


def inferring() -> bool:
    """Whether this is inference. Compiled code cannot query that mode, and never is."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def fused(x: Tensor) -> bool:
    """Whether to run a kernel: in inference only, since kernels have no gradients."""
    return x.is_cuda and inferring()


@dataclass
class Residual:
    """The residual stream of inference on a GPU: fp32, updated in place. Terms of a product that are not added yet wait for
    the next norm, which reads the whole stream anyway."""

    sum: Tensor
    terms: kernels.Terms | None = None

    def take_terms(self) -> kernels.Terms | None:
        terms, self.terms = self.terms, None
        return terms

    def settled(self) -> Tensor:
        if terms := self.take_terms():
            from llamarl.model import kernels

            kernels.add_terms(self.sum, terms)
        return self.sum


Stream = Tensor | Residual


def settled(x: Stream) -> Tensor:
    """The residual stream with all terms added."""
    return x.settled() if isinstance(x, Residual) else x


def rms_norm(x: Stream, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """RMS norm, in the precision of the weight; with `plus_one` times 1 + weight, summed in fp32."""
    if isinstance(x, Residual):
        from llamarl.model import kernels

        terms = x.take_terms()
        if terms:
            return kernels.add_and_norm(x.sum, terms, weight, eps, plus_one=plus_one)
        return kernels.rms_norm(x.sum, weight, eps, plus_one=plus_one)
    if fused(x):
        from llamarl.model import kernels

        return kernels.rms_norm(x, weight, eps, plus_one=plus_one)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return narrowed((weight.float() + 1.0 if plus_one else weight) * normed, weight.dtype)


def rotate(x_BTHD: Tensor, rope: Rope) -> Tensor:
    """Rotates each pair (i, i + D/2) of every head by the angle of its position. With tables of fewer than D features, only
    the first ones of a head are rotated."""
    if fused(x_BTHD):
        from llamarl.model import kernels

        return kernels.rotate(x_BTHD, rope)
    cos, sin = rope
    if (rotated := cos.shape[-1]) < x_BTHD.shape[-1]:
        return torch.cat((rotate(x_BTHD[..., :rotated], rope), x_BTHD[..., rotated:]), dim=-1)
    wide = x_BTHD.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BTHD.dtype)


def silu_times(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; the last dimension holds all of gate, then all of up."""
    if fused(gate_up):
        from llamarl.model import kernels

        return kernels.silu_times(gate_up)
    return gated(*gate_up.chunk(2, dim=-1))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return narrowed(F.silu(gate.float()) * up.float(), gate.dtype)


def gelu_times(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the approximation by tanh; the last dimension holds all of gate, then all of up."""
    if fused(gate_up):
        from llamarl.model import kernels

        return kernels.silu_times(gate_up, gelu=True)
    return gelu_gated(*gate_up.chunk(2, dim=-1))


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    return narrowed(F.gelu(gate.float(), approximate="tanh") * up.float(), gate.dtype)


Gated = Callable[[Tensor, Tensor], Tensor]
# The functions of each activation: of gate and up apart, and of both in one tensor.
ACTIVATIONS: dict[Activation, tuple[Gated, Callable[[Tensor], Tensor]]] = {
    "silu": (gated, silu_times),
    "gelu_tanh": (gelu_gated, gelu_times),
}


def softcapped(scores: Tensor, cap: float) -> Tensor:
    """Scores bounded smoothly by +-cap; 0: unbounded."""
    return (scores / cap).tanh() * cap if cap else scores


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a narrower type. Values beyond the range of fp16 become its largest number; bf16 has the range of fp32."""
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).to(dtype) if dtype == torch.float16 else x.to(dtype)


def add_projection(residual: Stream, linear: nn.Linear, x: Any) -> Stream:
    """residual + linear(x) in fp32. In inference on a GPU the sum overwrites the residual, now or with the next norm.
    Parallel and quantized layers (`quantize.QuantizedLinear`) compute the product in their own way. A layer with adapters
    `beside` it (`lora.py`) adds theirs around that."""
    total = settled(residual)
    if (beside := getattr(linear, "beside", None)) is not None:
        out: Stream = beside(total, x, lambda total: _add_product(total, linear, x))
        return out
    return _add_product(total, linear, x)


def _add_product(total: Tensor, linear: nn.Linear, x: Any) -> Stream:
    in_place, terms_of = fused(total), getattr(linear, "terms", None)
    wide = _plain(linear) and on_gpu(x) and x.dtype != torch.float32
    if linear.bias is not None and (in_place or wide or isinstance(linear, ReplacedLinear)):
        # Products below are without bias, which is added once: a sum over ranks would add it on each of them.
        total = total.add_(linear.bias) if in_place else total + linear.bias
    if in_place and terms_of:
        return Residual(total, terms_of(x))
    if in_place and _plain(linear):
        from llamarl.model import kernels

        return Residual(total, kernels.add_product(total.flatten(0, -2), x.flatten(0, -2), linear.weight))
    if wide:
        return total + wide_product(x, linear.weight)
    out: Tensor = total + linear(x)
    return out


def _plain(linear: nn.Linear) -> bool:
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter


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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients are multiplied in the precision of the weights, as for any other product."""
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad @ weight, of_weight


def scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 products with every row of the head, for inputs of any precision: narrow scores would cost quality."""
    if fused(hidden) and weight.dtype != torch.float32:
        flat = hidden.flatten(0, -2)
        return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
    return F.linear(hidden.float(), weight.float())
