"""Triton twins of `ops.py`: one pass over memory each. Imported only where a GPU computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 1024


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, inner, outer_stride, inner_stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
    x = tl.load(at + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + columns, weight * normed.to(x.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows may be heads inside wider rows (Qwen3 norms queries and keys so); the result is contiguous."""
    size, inner = x.shape[-1], x.shape[-2] if x.dim() == 4 else 1
    rows = x.reshape(-1, inner, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(len(rows) * inner,)](
        rows, weight, out, inner, rows.stride(0), rows.stride(1), size, eps, BLOCK=block, num_warps=_warps(block)
    )
    return out


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    row_stride,
    head_stride,
    heads,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    inside = (head < heads) & (pair < HALF)
    at = x_ptr + row * row_stride + head * head_stride + pair
    left = tl.load(at, mask=inside, other=0.0)
    right = tl.load(at + HALF, mask=inside, other=0.0)
    angle = row * (2 * HALF) + pair
    cos = tl.load(cos_ptr + angle, mask=pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=pair < HALF, other=0.0)
    to = out_ptr + row * heads * (2 * HALF) + head * (2 * HALF) + pair
    tl.store(to, left * cos - right * sin, mask=inside)
    tl.store(to + HALF, right * cos + left * sin, mask=inside)


def rotate(x_BTHD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.contiguous() for part in rope)
    heads, size = x_BTHD.shape[2:]
    rows = x_BTHD.reshape(-1, heads, size)
    out = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    half = size // 2
    _rotate[(len(rows),)](
        rows,
        cos,
        sin,
        out,
        rows.stride(0),
        rows.stride(1),
        heads,
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        HEADS=triton.next_power_of_2(heads),
        num_warps=4,
    )
    return out


@triton.jit
def _silu_times(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    at = x_ptr + row * 2 * size + columns
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + size, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(out_ptr + row * size + columns, silu * up, mask=inside)


def silu_times(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(size))
    _silu_times[(out.numel() // size, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=4)
    return out


def _warps(block: int) -> int:
    return min(8, max(1, block // 256))
