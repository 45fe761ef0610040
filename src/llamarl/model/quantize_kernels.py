"""Triton versions of the functions of `quantize.py`. Imported only on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.model.kernels import Terms, summed

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_OUT, _IN = 128, 64  # of one tile of the weights


@triton.jit
def _put_row(x, values_ptr, scales_ptr, row, columns, inside, size, LARGEST: tl.constexpr, WHOLE: tl.constexpr = False):
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, 1e-12)
    tl.store(scales_ptr + row, scale)
    scaled = tl.minimum(tl.maximum(tl.div_rn(x, scale), -LARGEST), LARGEST)
    if WHOLE:
        scaled = _to_even(scaled)
    tl.store(values_ptr + row * size + columns, scaled.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_rows(
    x_ptr, values_ptr, scales_ptr, size, row_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    _put_row(x, values_ptr, scales_ptr, row, columns, inside, size, LARGEST, WHOLE)


@triton.jit
def _silu_rows(
    x_ptr,
    row_scales_ptr,
    column_scales_ptr,
    values_ptr,
    scales_ptr,
    size,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    at = x_ptr + row * 2 * size + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(row_scales_ptr + row)
    gate *= scale * tl.load(column_scales_ptr + columns, mask=inside, other=0.0)
    up *= scale * tl.load(column_scales_ptr + size + columns, mask=inside, other=0.0)
    inner = (gate * tl.sigmoid(gate) * up).to(x_ptr.dtype.element_ty).to(tl.float32)  # as if it had been written
    _put_row(inner, values_ptr, scales_ptr, row, columns, inside, size, LARGEST)


def silu_rows(gate_up: Terms) -> tuple[Tensor, Tensor]:
    """`ops.silu_times` of one term, [1, ..., N], and its scales; quantized to fp8 row by row."""
    _, *outer, double = gate_up.parts_PMN.shape
    size = double // 2
    values = torch.empty(*outer, size, dtype=torch.float8_e4m3fn, device=gate_up.parts_PMN.device)
    scales = torch.empty(outer, dtype=torch.float32, device=values.device)
    block = triton.next_power_of_2(size)
    _silu_rows[(scales.numel(),)](
        *gate_up.pointers, values, scales, size, LARGEST=448.0, BLOCK=block, num_warps=_warps(block)
    )
    return values, scales


@triton.jit
def _put_normed(
    x,
    weight_ptr,
    values_ptr,
    scales_ptr,
    row,
    columns,
    inside,
    size,
    eps,
    LARGEST: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    factors = weight.to(tl.float32)
    if PLUS_ONE:
        factors += 1.0
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * factors
    normed = normed.to(weight.dtype).to(tl.float32)  # as if the norm had been written
    _put_row(normed, values_ptr, scales_ptr, row, columns, inside, size, LARGEST)


@triton.jit
def _norm_rows(
    x_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    size,
    eps,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    _put_normed(x, weight_ptr, values_ptr, scales_ptr, row, columns, inside, size, eps, LARGEST, PLUS_ONE)


@triton.jit
def _add_and_norm_rows(
    residual_ptr,
    parts_ptr,
    row_scales_ptr,
    column_scales_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    size,
    part_stride,
    eps,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < size
    # fmt: off
    x = summed(residual_ptr, parts_ptr, row_scales_ptr, column_scales_ptr, row, columns, inside, size, part_stride,
                PARTS, SCALED)
    # fmt: on
    _put_normed(x, weight_ptr, values_ptr, scales_ptr, row, columns, inside, size, eps, LARGEST, PLUS_ONE)


def norm_rows(
    x: Tensor, weight: Tensor, eps: float, terms: Terms | None = None, *, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """`ops.rms_norm`, quantized to fp8 row by row; first adds the terms that x still lacks."""
    size = x.shape[-1]
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block, rows = triton.next_power_of_2(size), scales.numel()
    options = {"LARGEST": 448.0, "BLOCK": block, "PLUS_ONE": plus_one, "num_warps": _warps(block)}
    if terms is None:
        _norm_rows[(rows,)](x.contiguous(), weight, values, scales, size, eps, **options)
    else:
        _add_and_norm_rows[(rows,)](
            x, *terms.pointers, weight, values, scales, size, rows * size, eps, **terms.options, **options
        )
    return values, scales


@triton.jit
def _to_even(x):
    """The nearest whole number, ties to even, as `torch.round` does. Valid for |x| < 2 ** 22."""
    magic: tl.constexpr = 12582912.0
    return (x + magic) - magic


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_rows[(len(rows),)](
        rows,
        values,
        scales,
        size,
        rows.stride(0),
        LARGEST=_LARGEST[dtype],
        BLOCK=block,
        WHOLE=dtype == torch.int8,
        num_warps=_warps(block),
    )
    return values, scales


@triton.jit
def _int8_product(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_out,
    num_in,
    x_row,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
):
    """One tile of the result. Rows vary fastest, so that neighbors read the same weights."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(1) * OUT + tl.arange(0, OUT)
    ins = tl.arange(0, IN)
    x_at = x_ptr + rows[:, None].to(tl.int64) * x_row + ins[None, :]
    weight_at = weight_ptr + outs[None, :].to(tl.int64) * num_in + ins[:, None]
    total = tl.zeros([ROWS, OUT], tl.float32)
    for start in tl.range(0, num_in, IN):
        here = start + ins < num_in
        x = tl.load(x_at + start, mask=(rows[:, None] < num_rows) & here[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=(outs[None, :] < num_out) & here[:, None], other=0)
        total = tl.dot(x, weight.to(x.dtype), total)
    total = total * tl.load(scales_ptr + outs, mask=outs < num_out, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=outs < num_out, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(rows[:, None] < num_rows) & (outs[None, :] < num_out))


def int8_product(x_MK: Tensor, weight_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None) -> Tensor:
    (num_rows, num_in), num_out = x_MK.shape, len(weight_NK)
    out_MN = torch.empty(num_rows, num_out, dtype=x_MK.dtype, device=x_MK.device)
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    _int8_product[(triton.cdiv(num_rows, rows), triton.cdiv(num_out, _OUT))](
        x_MK,
        weight_NK,
        scales_N,
        scales_N if bias_N is None else bias_N,
        out_MN,
        num_rows,
        num_out,
        num_in,
        x_MK.stride(0),
        HAS_BIAS=bias_N is not None,
        ROWS=rows,
        OUT=_OUT,
        IN=_IN,
        num_warps=8 if rows == 128 else 4,
        num_stages=4,
    )
    return out_MN


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
