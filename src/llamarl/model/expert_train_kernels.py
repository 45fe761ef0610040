"""Triton versions of what `expert_products.py` does between products in training. Imported only on a GPU.

Each is one pass over memory, with one program for each row, or part of a row. Rows of pairs whose experts are on other ranks
were written by nobody: none of them is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.model.kernels import narrowed

_MAX_BLOCK = 1024
_LARGE_BLOCK = 16_384


@triton.jit
def _sum_rows(
    y_ptr, places_ptr, weights_ptr, ends_ptr, out_ptr, size, k, experts, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(ends_ptr + experts - 1)
    out = tl.zeros([BLOCK], tl.float32)
    for one in range(k):
        place = tl.load(places_ptr + token * k + one).to(tl.int64)
        written = tl.where(place < held, size, 0)
        y = tl.load(y_ptr + place * size + column, mask=column < written, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weights_ptr + token * k + one).to(tl.float32)
        out += y
    tl.store(out_ptr + token * size + column, out.to(out_ptr.dtype.element_ty), mask=column < size)


def sum_rows(
    y_PC: Tensor, places: Tensor, weights_TK: Tensor | None, k: int, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """The kernel of `expert_products.sum_rows`."""
    tokens, size = len(places) // k, y_PC.shape[1]
    out = torch.empty(tokens, size, dtype=dtype, device=y_PC.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(size))
    _sum_rows[(tokens, triton.cdiv(size, block))](
        y_PC.contiguous(),
        places,
        places if weights_TK is None else weights_TK.contiguous(),
        ends_E,
        out,
        size,
        k,
        len(ends_E),
        WEIGHTED=weights_TK is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _gated_backward(
    outer_ptr,
    inner_grad_ptr,
    weights_ptr,
    order_ptr,
    ends_ptr,
    outer_grad_ptr,
    inner_ptr,
    weights_grad_ptr,
    size,
    experts,
    BLOCK: tl.constexpr,
):
    """One program for each row. What the activation made is rounded before it is read, as it was in the forward pass."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + row)
    if row >= tl.load(ends_ptr + experts - 1):
        tl.store(weights_grad_ptr + pair, 0.0)
        return
    dtype = inner_ptr.dtype.element_ty
    weight = tl.load(weights_ptr + pair).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        at = row * 2 * size + column
        gate = tl.load(outer_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(outer_ptr + at + size, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(inner_grad_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        wide = gate * share * up
        inner = narrowed(wide, dtype).to(tl.float32)
        total += inner * grad
        tl.store(inner_ptr + row * size + column, narrowed(weight * inner, dtype), mask=inside)
        grad *= weight
        if dtype == tl.float16:  # what was bounded has no gradient
            grad = tl.where(tl.abs(wide) <= 65504.0, grad, 0.0)
        of_gate = grad * up * share * (1.0 + gate * (1.0 - share))
        tl.store(outer_grad_ptr + at, of_gate.to(dtype), mask=inside)
        tl.store(outer_grad_ptr + at + size, (grad * gate * share).to(dtype), mask=inside)
    tl.store(weights_grad_ptr + pair, tl.sum(total, axis=0))


def gated_backward(
    outer_PN: Tensor, inner_grad_PI: Tensor, weights_TK: Tensor, order: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `expert_products.gated_backward`, of silu."""
    rows, size = inner_grad_PI.shape
    outer_grad, inner = torch.empty_like(outer_PN), torch.empty_like(inner_grad_PI)
    weights_grad = torch.empty(rows, dtype=torch.float32, device=outer_PN.device)
    _gated_backward[(rows,)](
        outer_PN,
        inner_grad_PI,
        weights_TK.contiguous(),
        order,
        ends_E,
        outer_grad,
        inner,
        weights_grad,
        size,
        len(ends_E),
        BLOCK=min(_MAX_BLOCK, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return outer_grad, inner, weights_grad


@triton.jit
def _zero_unused(out_ptr, ends_ptr, size, BLOCK: tl.constexpr):
    """One program for a part of one expert's matrix; nothing is read or written where it has rows."""
    expert = tl.program_id(0)
    before = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends_ptr + expert) == before:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
        tl.store(out_ptr + expert.to(tl.int64) * size + column, zeros, mask=column < size)


def zero_unused(out_ENC: Tensor, ends_E: Tensor) -> Tensor:
    """The kernel of `expert_products._zero_unused`, in place: a mask would read and write all matrices."""
    assert out_ENC.is_contiguous()
    experts, size = len(out_ENC), out_ENC[0].numel()
    _zero_unused[(experts, triton.cdiv(size, _LARGE_BLOCK))](out_ENC, ends_E, size, BLOCK=_LARGE_BLOCK, num_warps=8)
    return out_ENC
