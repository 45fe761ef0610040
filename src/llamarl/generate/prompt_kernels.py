"""Attention of prompt tokens that follow one another in one sequence, over its pages, in Triton: on a GPU what
`beside.PromptAttention` does in plain PyTorch. Imported only where a GPU decodes.

Queries are the rows of a product and cached tokens its columns: the query heads that share a key-value head, of as many
tokens as fill a tile, so that what is cached is read once for a tile. There are few tiles, so what each attends to is cut
into parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.generate.attention_blocks import (
    INTERPRETED,
    capped,
    operand,
    padded_size,
    score_cap,
    score_scale,
    turned,
    widened,
)
from llamarl.generate.kv_cache import Pages
from llamarl.generate.kv_splits import parts_of_prompt
from llamarl.generate.page_kernels import write_new
from llamarl.model.ops import Rope
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions

_MIN_ROWS = 16  # least rows of a tensor core's product
_LARGEST_HEAD = 128  # above it, and in fp32, tiles are smaller, so that they fit a processor's memory


class PromptTiling(NamedTuple):
    """How the work is split."""

    rows: int  # queries of a tile
    block: int  # cached tokens read at once
    warps: int
    stages: int
    parts: int = 0  # 0: as many as keep a GPU busy


def prompt_tiling(size: int, dtype: torch.dtype, queries: int) -> PromptTiling:
    """`queries`: those of one key-value head."""
    is_wide = size > _LARGEST_HEAD or dtype == torch.float32
    how = PromptTiling(64, 32, 4, 2) if is_wide else PromptTiling(128, 64, 8, 3)
    return how._replace(rows=min(how.rows, max(_MIN_ROWS, triton.next_power_of_2(queries))))


@triton.jit
def _attend_block(
    q_low,
    q_high,
    largest,
    total,
    low,
    high,
    keys_at,
    values_at,
    key_scales_at,
    value_scales_at,
    inside,
    seen,
    in_width,
    scale,
    NARROW: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CAP: tl.constexpr,
):
    """The running softmax of `attention_blocks`, with a query in each row, extended by the tokens of one block. A row may see
    none of them."""
    k = tl.load(keys_at, mask=in_width[:, None] & inside[None, :], other=0)
    if NARROW:
        k_low, k_high = widened(k, q_low.dtype, INTERPRETED)
        score = tl.dot(q_low, k_low, input_precision="ieee")
        score = tl.dot(q_high, k_high, score, input_precision="ieee")
        score *= (tl.load(key_scales_at, mask=inside, other=0.0) * scale)[None, :]
        score = tl.where(seen, capped(score, CAP), float("-inf"))
        v_scale = tl.load(value_scales_at, mask=inside, other=1.0)
        bound = score + tl.log2(v_scale)[None, :]
    else:
        score = tl.where(seen, capped(tl.dot(q_low, k, input_precision="ieee") * scale, CAP), float("-inf"))
        bound = score
    higher = tl.maximum(largest, tl.max(bound, axis=1))
    against = tl.where(higher == float("-inf"), 0.0, higher)
    weight, shrink = tl.exp2(score - against[:, None]), tl.exp2(largest - against)
    total = total * shrink + tl.sum(weight, axis=1)
    v = tl.load(values_at, mask=inside[:, None] & in_width[None, :], other=0)
    if NARROW:
        v_low, v_high = widened(v, q_low.dtype, INTERPRETED)
        weight = (weight * v_scale[None, :]).to(q_low.dtype)
        low = tl.dot(weight, v_low, low * shrink[:, None], input_precision="ieee")
        high = tl.dot(weight, v_high, high * shrink[:, None], input_precision="ieee")
    else:
        low = tl.dot(weight.to(v.dtype), v, low * shrink[:, None], input_precision="ieee")
    return higher, total, low, high


@triton.jit
def _attend_prompt(
    q_ptr,
    keys_ptr,
    key_scales_ptr,
    values_ptr,
    value_scales_ptr,
    out_ptr,
    sums_ptr,
    table_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    scale,
    q_row,
    head_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROTATED: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program: one tile of the queries that share a key-value head, over one part of the tokens up to its last one."""
    head, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query = tile * ROWS + tl.arange(0, ROWS)
    valid = query < tokens * GROUP
    token, heads = tl.where(valid, query // GROUP, 0), head * GROUP + query % GROUP
    before = tl.load(positions_ptr).to(tl.int32)  # tokens that come before all of these
    position = before + token
    step: tl.constexpr = 2 if NARROW else 1
    width: tl.constexpr = SIZE // step
    column, within = tl.arange(0, PADDED // step), tl.arange(0, BLOCK)
    in_width = column < width
    both = valid[:, None] & in_width[None, :]
    size, angle = step * column[None, :], position[:, None] * ROTATED
    q_at = q_ptr + token[:, None] * q_row + heads[:, None] * SIZE
    q_low = turned(q_at, cos_ptr + angle, sin_ptr + angle, size, both, both, SIZE, ROTATED)
    q_high = turned(q_at, cos_ptr + angle, sin_ptr + angle, size + 1, both, both, SIZE, ROTATED) if NARROW else q_low
    q_low, q_high = operand(q_low, NARROW), operand(q_high, NARROW)

    base = head.to(tl.int64) * head_tokens
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(before + tile * ROWS // GROUP - WINDOW + 1, 0) // BLOCK * BLOCK
    end = before + tl.minimum((tile * ROWS + ROWS - 1) // GROUP + 1, tokens)
    num_blocks = tl.cdiv(end - begin, BLOCK)
    per_part = tl.cdiv(num_blocks, PARTS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_blocks)
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    low = tl.zeros([ROWS, PADDED // step], tl.float32)
    high = tl.zeros([ROWS, PADDED // step], tl.float32) if NARROW else 0.0
    # Pages are looked up one block ahead, so that the loads of several blocks can overlap.
    ahead = begin + first * BLOCK + within
    page = tl.load(table_ptr + ahead // PAGE, mask=ahead < end, other=0)
    for block in tl.range(first, last):
        at = begin + block * BLOCK + within
        inside = at < end
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        places = base + page.to(tl.int64) * PAGE + at % PAGE
        page = tl.load(table_ptr + (at + BLOCK) // PAGE, mask=at + BLOCK < end, other=0)
        # fmt: off
        largest, total, low, high = _attend_block(
            q_low, q_high, largest, total, low, high,
            keys_ptr + (places[None, :] * width + column[:, None]),
            values_ptr + (places[:, None] * width + column[None, :]),
            key_scales_ptr + places, value_scales_ptr + places,
            inside, seen, in_width, scale, NARROW, INTERPRETED, CAP,
        )
        # fmt: on
    inverse = (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    row = (token * HEADS + heads) * PARTS + part
    out = out_ptr + row[:, None] * SIZE + size
    tl.store(out, (low * inverse).to(out_ptr.dtype.element_ty), mask=both)
    if NARROW:
        tl.store(out + 1, (high * inverse).to(out_ptr.dtype.element_ty), mask=both)
    if PARTS > 1:
        tl.store(sums_ptr + row, tl.where(total > 0, largest + tl.log2(total), float("-inf")), mask=valid)


@triton.jit
def _join(partial_ptr, sums_ptr, out_ptr, SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    """One program: the result of one query, as the mean of its parts, of which one at least is not empty."""
    row, part, size = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, PADDED)
    sums = tl.load(sums_ptr + row * PARTS + part)
    weight = tl.exp2(sums - tl.max(sums, axis=0))
    at = (row * PARTS + part)[:, None] * SIZE + size[None, :]
    found = tl.load(partial_ptr + at, mask=(size < SIZE)[None, :] & (weight > 0)[:, None], other=0.0)
    joined = tl.sum(found * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out_ptr + row * SIZE + size, joined.to(out_ptr.dtype.element_ty), mask=size < SIZE)


def attend_prompt(
    qkv: tuple[Tensor, Tensor, Tensor],
    keys: Pages,
    values: Pages,
    table_MP: Tensor,
    rows_M: Tensor,
    positions_M: Tensor,
    rope: Rope,
    *,
    how: PromptTiling | None = None,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> Tensor:
    """Write the keys and values of tokens that follow one another to their pages, and attend to all tokens up to each, or to
    those in the window. All rows of the table are the same, and `rows_M` counts them.

    `qkv` are as the product made them, [M, 1, heads, D]; `rope` holds cos and sin of every position, [T, 1, D] in fp32."""
    q_M1HD, k_M1KD, v_M1KD = qkv
    tokens, _, heads, size = q_M1HD.shape
    kv_heads, num_pages, page_tokens, _ = keys.values_KPTD.shape
    group = heads // kv_heads
    how = how or prompt_tiling(size, q_M1HD.dtype, tokens * group)
    tiles = triton.cdiv(tokens * group, how.rows)
    parts = how.parts or parts_of_prompt(tiles * kv_heads)
    write_new(k_M1KD, v_M1KD, keys, values, table_MP, rows_M, positions_M, rope)
    out = torch.empty(tokens, 1, heads, size, dtype=q_M1HD.dtype, device=q_M1HD.device)
    partial, sums = out, rope[0]  # any tensor, if nothing is cut
    if parts > 1:
        partial = torch.empty(tokens, heads, parts, size, dtype=torch.float32, device=out.device)
        sums = torch.empty(tokens, heads, parts, dtype=torch.float32, device=out.device)
    _attend_prompt[(kv_heads, tiles, parts)](
        q_M1HD,
        *keys.pointers,
        *values.pointers,
        partial,
        sums,
        table_MP,
        positions_M,
        *rope,
        tokens,
        score_scale(size, options),
        q_M1HD.stride(0),
        num_pages * page_tokens,
        HEADS=heads,
        GROUP=group,
        ROWS=how.rows,
        SIZE=size,
        PADDED=padded_size(size, narrow=keys.narrow),
        PAGE=page_tokens,
        BLOCK=how.block,
        PARTS=parts,
        NARROW=keys.narrow,
        INTERPRETED=INTERPRETED,
        ROTATED=rope[0].shape[-1],
        CAP=score_cap(options),
        WINDOW=options.window,
        num_warps=how.warps,
        num_stages=how.stages,
    )
    if parts > 1:
        padded = triton.next_power_of_2(size)
        _join[(tokens * heads,)](partial, sums, out, SIZE=size, PADDED=padded, PARTS=parts, num_warps=1)
    return out
