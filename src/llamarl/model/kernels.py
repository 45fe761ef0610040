"""Triton versions of the functions of `ops.py`, each one pass over memory. Imported only on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 1024
_TILE = 128  # rows and columns of a product that one multiprocessor makes
_BUSY_TILES = 132
_LONG_SUM = 4096


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """The kernel of `ops.narrowed`."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    inner,
    outer_stride,
    inner_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr = False,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
    x = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    tl.store(out_ptr + row * size + columns, narrowed(weight * normed, out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """RMS norm of rows, which may be heads inside wider rows, as in Qwen3. The result is contiguous."""
    size, inner = x.shape[-1], x.shape[-2] if x.dim() == 4 else 1
    rows = x.reshape(-1, inner, size)
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(len(rows) * inner,)](
        rows,
        weight,
        out,
        inner,
        rows.stride(0),
        rows.stride(1),
        size,
        eps,
        BLOCK=block,
        PLUS_ONE=plus_one,
        num_warps=_warps(block),
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
    SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    inside = (head < heads) & (pair < HALF)
    at = x_ptr + row * row_stride + head * head_stride + pair
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = row * (2 * HALF) + pair
    cos = tl.load(cos_ptr + angle, mask=pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=pair < HALF, other=0.0)
    to = out_ptr + row * heads * SIZE + head * SIZE + pair
    tl.store(to, (left * cos - right * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (right * cos + left * sin).to(out_ptr.dtype.element_ty), mask=inside)
    if SIZE > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        kept = (head < heads) & (rest < SIZE)
        x = tl.load(x_ptr + row * row_stride + head * head_stride + rest, mask=kept, other=0.0)
        tl.store(out_ptr + row * heads * SIZE + head * SIZE + rest, x, mask=kept)


def rotate(x_BTHD: Tensor, rope: tuple[Tensor, ...]) -> Tensor:
    cos, sin = (part.contiguous() for part in rope)
    heads, size = x_BTHD.shape[2:]
    rows = x_BTHD.reshape(-1, heads, size)
    out = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)
    half = cos.shape[-1] // 2
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
        SIZE=size,
        REST_PAD=triton.next_power_of_2(max(1, size - 2 * half)),
        num_warps=4,
    )
    return out


@triton.jit
def _silu_times(x_ptr, out_ptr, size, BLOCK: tl.constexpr, GELU: tl.constexpr = False):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    at = x_ptr + row * 2 * size + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # by tanh: 0.5 * (1 + tanh(z)) is sigmoid(2 z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(
        out_ptr + row * size + columns, narrowed(gate * tl.sigmoid(inner) * up, out_ptr.dtype.element_ty), mask=inside
    )


def silu_times(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """The kernel of `ops.silu_times`, and of `ops.gelu_times`."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(size))
    _silu_times[(out.numel() // size, triton.cdiv(size, block))](
        gate_up, out, size, BLOCK=block, GELU=gelu, num_warps=4
    )
    return out


@triton.jit
def summed(
    residual_ptr,
    parts_ptr,
    row_scales_ptr,
    column_scales_ptr,
    row,
    columns,
    inside,
    size,
    part_stride,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The residual stream with all terms added; the sum is also written back."""
    at = row * size + columns
    total = tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * part_stride + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        total *= tl.load(row_scales_ptr + row) * tl.load(column_scales_ptr + columns, mask=inside, other=0.0)
    total += tl.load(residual_ptr + at, mask=inside, other=0.0)
    tl.store(residual_ptr + at, total, mask=inside)
    return total


@triton.jit
def _add_parts(
    residual_ptr,
    parts_ptr,
    row_scales_ptr,
    column_scales_ptr,
    size,
    part_stride,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # fmt: off
    summed(residual_ptr, parts_ptr, row_scales_ptr, column_scales_ptr, tl.program_id(0).to(tl.int64), columns,
            columns < size, size, part_stride, PARTS, SCALED)
    # fmt: on


@triton.jit
def _add_and_norm(
    residual_ptr,
    parts_ptr,
    row_scales_ptr,
    column_scales_ptr,
    weight_ptr,
    out_ptr,
    size,
    part_stride,
    eps,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr = False,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    # fmt: off
    x = summed(residual_ptr, parts_ptr, row_scales_ptr, column_scales_ptr, row, columns, inside, size, part_stride,
                PARTS, SCALED)
    # fmt: on
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    tl.store(out_ptr + row * size + columns, narrowed(weight * normed, out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Terms:
    """Terms still to be added to the residual stream: their sum, times a scale for each row and each column."""

    parts_PMN: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.parts_PMN, *(self.scales or (self.parts_PMN, self.parts_PMN))

    @property
    def options(self) -> dict[str, int]:
        return {"PARTS": len(self.parts_PMN), "SCALED": self.scales is not None}


def add_terms(residual: Tensor, terms: Terms) -> None:
    _, rows, size = terms.parts_PMN.shape
    block = min(_MAX_BLOCK, triton.next_power_of_2(size))
    _add_parts[(rows, triton.cdiv(size, block))](
        residual, *terms.pointers, size, rows * size, **terms.options, BLOCK=block, num_warps=4
    )


def add_and_norm(residual: Tensor, terms: Terms, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """`add_terms` and then `rms_norm`, in one pass."""
    _, rows, size = terms.parts_PMN.shape
    out = torch.empty(residual.shape, dtype=weight.dtype, device=residual.device)
    block = triton.next_power_of_2(size)
    _add_and_norm[(rows,)](
        residual,
        *terms.pointers,
        weight,
        out,
        size,
        rows * size,
        eps,
        **terms.options,
        BLOCK=block,
        PLUS_ONE=plus_one,
        num_warps=_warps(block),
    )
    return out


def add_product(residual_MN: Tensor, x_MK: Tensor, weight_NK: Tensor) -> Terms | None:
    """residual += x @ weight.t(), summed in fp32; or the terms that are still to be added."""
    (rows, inner), outer = x_MK.shape, len(weight_NK)
    num_parts = parts_of_product(rows, outer, inner) if x_MK.dtype != torch.float32 else 1
    if num_parts > 1:
        x_PMk = x_MK.view(rows, num_parts, -1).transpose(0, 1)
        weight_PkN = weight_NK.view(outer, num_parts, -1).permute(1, 2, 0)
        return Terms(torch.bmm(x_PMk, weight_PkN, out_dtype=torch.float32))
    if x_MK.dtype == torch.float32:
        torch.addmm(residual_MN, x_MK, weight_NK.t(), out=residual_MN)
    else:
        torch.addmm(residual_MN, x_MK, weight_NK.t(), out_dtype=torch.float32, out=residual_MN)
    return None


def parts_of_product(rows: int, outer: int, inner: int) -> int:
    """Number of parts that a product's long sum is cut into: with few tiles, one part would leave most of a GPU idle."""
    tiles = triton.cdiv(rows, _TILE) * triton.cdiv(outer, _TILE)
    possible = [parts for parts in (2, 4) if parts * tiles <= _BUSY_TILES and inner % (parts * _TILE) == 0]
    return max(possible, default=1) if inner >= _LONG_SUM else 1


def _warps(block: int) -> int:
    return min(8, max(1, block // 256))
