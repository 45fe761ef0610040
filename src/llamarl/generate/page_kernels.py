"""Triton kernels that write keys and values to pages: those of whole sequences, and new ones of rows. Imported only where a
GPU decodes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llamarl.generate.attention_blocks import new_token, padded_size, put
from llamarl.generate.kv_cache import Pages
from llamarl.model.ops import Rope


@triton.jit
def _write_pages(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    pages_ptr,
    tokens,
    k_row,
    v_row,
    head_tokens,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.arange(0, PADDED)
    in_size = size < SIZE
    where = head.to(tl.int64) * head_tokens + tl.load(pages_ptr + token) * PAGE + (token % tokens) % PAGE
    from_head = head * SIZE + size
    k = tl.load(k_ptr + token * k_row + from_head, mask=in_size, other=0.0)
    v = tl.load(v_ptr + token * v_row + from_head, mask=in_size, other=0.0)
    tl.store(keys_ptr + where * SIZE + size, k, mask=in_size)
    tl.store(values_ptr + where * SIZE + size, v, mask=in_size)


def write_pages(k_RTKD: Tensor, v_RTKD: Tensor, keys: Pages, values: Pages, pages_N: Tensor) -> None:
    """Write keys and values of whole sequences to their pages: `Pages.put` of both. Not for fp8 pages."""
    kv_heads, num_pages, page_tokens, size = keys.values_KPTD.shape
    k_NKD, v_NKD = k_RTKD.flatten(0, 1), v_RTKD.flatten(0, 1)
    _write_pages[(len(pages_N), kv_heads)](
        k_NKD,
        v_NKD,
        keys.values_KPTD,
        values.values_KPTD,
        pages_N,
        k_RTKD.shape[1],
        k_NKD.stride(0),
        v_NKD.stride(0),
        num_pages * page_tokens,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        PAGE=page_tokens,
        num_warps=1,
    )


@triton.jit
def _write_new(
    k_ptr,
    v_ptr,
    keys_ptr,
    key_scales_ptr,
    values_ptr,
    value_scales_ptr,
    table_ptr,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    k_row,
    v_row,
    head_tokens,
    table_row,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    NARROW: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """One program: the new key and value of one key-value head of one row, rotated, written as decode attention writes
    them."""
    head, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + slot).to(tl.int32)
    step: tl.constexpr = 2 if NARROW else 1
    width: tl.constexpr = SIZE // step
    column = tl.arange(0, PADDED // step)
    in_width = column < width
    cos_at, sin_at = cos_ptr + position * ROTATED, sin_ptr + position * ROTATED
    k_at, v_at = k_ptr + row * k_row + head * SIZE, v_ptr + row * v_row + head * SIZE
    k_low, k_high, v_low, v_high = new_token(k_at, v_at, cos_at, sin_at, step * column, in_width, SIZE, ROTATED, NARROW)
    page = tl.load(table_ptr + slot * table_row + position // PAGE).to(tl.int64)
    where = head.to(tl.int64) * head_tokens + page * PAGE + position % PAGE
    put(k_low, k_high, keys_ptr, key_scales_ptr, where, column, in_width, width, NARROW)
    put(v_low, v_high, values_ptr, value_scales_ptr, where, column, in_width, width, NARROW)


def write_new(
    k_B1KD: Tensor,
    v_B1KD: Tensor,
    keys: Pages,
    values: Pages,
    table_SP: Tensor,
    slots_B: Tensor,
    positions_S: Tensor,
    rope: Rope,
) -> None:
    """Write the new key and value of each row to its page, before any row reads them: for rows that hold one sequence at
    different positions. `rope` holds cos and sin of every position, [T, 1, D] in fp32."""
    kv_heads, num_pages, page_tokens, size = keys.values_KPTD.shape
    _write_new[(kv_heads, len(slots_B))](
        k_B1KD,
        v_B1KD,
        *keys.pointers,
        *values.pointers,
        table_SP,
        slots_B,
        positions_S,
        *rope,
        k_B1KD.stride(0),
        v_B1KD.stride(0),
        num_pages * page_tokens,
        table_SP.stride(0),
        SIZE=size,
        PADDED=padded_size(size, narrow=keys.narrow),
        PAGE=page_tokens,
        NARROW=keys.narrow,
        ROTATED=rope[0].shape[-1],
        num_warps=1,
    )
