"""A leaner decode attention on trial, with the interface of `llamarl.generate.attention_kernels`.

    python benchmarks/attention_variants.py

compares both on a GPU. What differs from the kernel in use: tokens are the rows of a product and query heads its eight
columns, so a tensor core wastes half instead of three quarters; one warp does a block alone, without meeting others; the new
token comes last, so that reading the cache begins at once; a block inside one page has one address; fp8 comes as pairs of
values, widened by one instruction in the order of the product; a shared prompt is cut into parts, and may be fp8.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from llamarl.generate.cache import Pages, Readings, members_of_reading
from llamarl.model.ops import Rope

_BUSY_PROGRAMS = 1024  # enough to keep a large GPU's memory busy; fewer sequences are cut into more parts
_MAX_PARTS = 16
_SHARED_PARTS = 4
_MIN_COLUMNS = 8  # of a product of a tensor core, which are query heads here
_MIN_INNER = 16
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a CPU knows no assembler


class Tiling(NamedTuple):
    block: int  # tokens of the cache, read at once
    warps: int
    stages: int
    early: bool = (
        False  # started while the kernel before it ends, and waiting for that only before it reads its results
    )

    @property
    def options(self) -> dict[str, int]:
        tile = {"BLOCK": self.block, "num_warps": self.warps, "num_stages": self.stages}
        early = self.early and not _INTERPRETED
        return {**tile, "EARLY": early, **({"launch_pdl": True} if early else {})}


def tiling(head_dim: int, columns: int, *, narrow: bool = False, shared: bool = False) -> Tiling:
    """`columns`: query heads side by side; many of them leave no registers for one warp."""
    if shared or columns > 16:
        return Tiling(64, 4, 3)
    return Tiling(32, 1, 3 if narrow or head_dim <= 64 else 2)


@triton.jit
def _turned(at, cos_at, sin_at, size, in_size, mask, SIZE: tl.constexpr):
    """`ops.rotate` of the vectors that begin at these places: each pair (i, i + SIZE / 2), rounded once."""
    half: tl.constexpr = SIZE // 2
    partner = tl.where(size < half, size + half, size - half)
    sign = tl.where(size < half, -1.0, 1.0)
    x = tl.load(at + size, mask=mask, other=0.0)
    other = tl.load(at + partner, mask=mask, other=0.0)
    cos = tl.load(cos_at + size, mask=in_size, other=0.0)
    sin = tl.load(sin_at + size, mask=in_size, other=0.0)
    return (x.to(tl.float32) * cos + other.to(tl.float32) * (sign * sin)).to(x.dtype)


@triton.jit
def _operand(q, NARROW: tl.constexpr):
    """A query as it meets the keys: fp8 is widened to fp16, which is one instruction."""
    if NARROW and q.dtype != tl.float32:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def _widened(pairs, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """The lower and the upper of each two fp8 values."""
    if INTERPRETED:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            .reg .b16 lows, highs;
            prmt.b32 bytes, $2, $2, 0x3120;
            mov.b32 {lows, highs}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, lows;
            cvt.rn.f16x2.e4m3x2 $1, highs;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low.to(dtype), high.to(dtype)


@triton.jit
def _put(low, high, values_ptr, scales_ptr, where, column, mask, WIDTH: tl.constexpr, NARROW: tl.constexpr):
    """Write one vector to its place in the cache; returns it as it can be read there, in fp32."""
    at = values_ptr + where * WIDTH + column
    if NARROW:
        low, high = low.to(tl.float32), high.to(tl.float32)
        scale = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0) / 448.0, 1e-12)
        tl.store(scales_ptr + where, scale)
        low8, high8 = tl.div_rn(low, scale).to(tl.float8e4nv), tl.div_rn(high, scale).to(tl.float8e4nv)
        pair = low8.to(tl.uint8, bitcast=True).to(tl.uint16) | (high8.to(tl.uint8, bitcast=True).to(tl.uint16) << 8)
        tl.store(at, pair.to(tl.int16, bitcast=True), mask=mask)
        low, high = low8.to(tl.float32) * scale, high8.to(tl.float32) * scale
    else:
        tl.store(at, low, mask=mask)
        low = low.to(tl.float32)
    return low, high


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
    in_width,
    scale,
    NARROW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Softmax over the tokens so far, extended by those of one block. With narrow values their scales go into the weights,
    which are held against the largest of these products, so that they fit fp16."""
    k = tl.load(keys_at, mask=inside[:, None] & in_width[None, :], other=0)
    if NARROW:
        k_low, k_high = _widened(k, q_low.dtype, INTERPRETED)
        score = tl.dot(k_low, q_low, input_precision="ieee")
        score = tl.dot(k_high, q_high, score, input_precision="ieee")
        score *= (tl.load(key_scales_at, mask=inside, other=0.0) * scale)[:, None]
        v_scale = tl.load(value_scales_at, mask=inside, other=1.0)
        bound = score + tl.log2(v_scale)[:, None]
    else:
        score = tl.dot(k, q_low, input_precision="ieee") * scale
        bound = score
    higher = tl.maximum(largest, tl.max(tl.where(inside[:, None], bound, float("-inf")), axis=0))
    weight = tl.exp2(tl.where(inside[:, None], score, float("-inf")) - higher[None, :])
    shrink = tl.exp2(largest - higher)
    total = total * shrink + tl.sum(weight, axis=0)
    v = tl.load(values_at, mask=in_width[:, None] & inside[None, :], other=0)
    if NARROW:
        v_low, v_high = _widened(v, q_low.dtype, INTERPRETED)
        weight = (weight * v_scale[:, None]).to(q_low.dtype)
        low = tl.dot(v_low, weight, low * shrink[None, :], input_precision="ieee")
        high = tl.dot(v_high, weight, high * shrink[None, :], input_precision="ieee")
    else:
        low = tl.dot(v, weight.to(v.dtype), low * shrink[None, :], input_precision="ieee")
    return higher, total, low, high


@triton.jit
def _attend_range(
    q_low,
    q_high,
    largest,
    total,
    low,
    high,
    keys_ptr,
    key_scales_ptr,
    values_ptr,
    value_scales_ptr,
    table,
    base,
    begin,
    first,
    last,
    end,
    column,
    scale,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Blocks from `first` to before `last`, of the tokens from `begin`, where a page begins, to before `end`. Pages are
    looked up one block ahead: only then can the loads of several blocks be under way at once."""
    within = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    one_page: tl.constexpr = PAGE % BLOCK == 0
    ahead = begin + first * BLOCK if one_page else begin + first * BLOCK + within
    page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
    for block in tl.range(first, last):
        start = begin + block * BLOCK
        inside = start + within < end
        if one_page:
            where = base + page.to(tl.int64) * PAGE + start % PAGE
            places = where + within
            by_token = where * WIDTH + (within[:, None] * WIDTH + column[None, :])
            by_column = where * WIDTH + (within[None, :] * WIDTH + column[:, None])
            ahead = start + BLOCK
        else:
            places = base + page.to(tl.int64) * PAGE + (start + within) % PAGE
            by_token = places[:, None] * WIDTH + column[None, :]
            by_column = places[None, :] * WIDTH + column[:, None]
            ahead = start + BLOCK + within
        page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
        # fmt: off
        largest, total, low, high = _attend_block(
            q_low, q_high, largest, total, low, high,
            keys_ptr + by_token, values_ptr + by_column, key_scales_ptr + places, value_scales_ptr + places,
            inside, in_width, scale, NARROW, INTERPRETED,
        )
        # fmt: on
    return largest, total, low, high


@triton.jit
def _add_one(score, v_low, v_high, largest, total, low, high, NARROW: tl.constexpr):
    """Softmax over the tokens so far, extended by one more, or by the mean of several whose sum has this logarithm."""
    higher = tl.maximum(largest, score)
    weight, shrink = tl.exp2(score - higher), tl.exp2(largest - higher)
    total = total * shrink + weight
    low = low * shrink[None, :] + v_low * weight[None, :]
    if NARROW:
        high = high * shrink[None, :] + v_high * weight[None, :]
    return higher, total, low, high


@triton.jit
def _add_shared(
    shared_ptr,
    sums_ptr,
    heads,
    in_group,
    size,
    both,
    largest,
    total,
    low,
    high,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Softmax extended by what `_attend_shared` has found."""
    for part in tl.static_range(PARTS):
        sums = tl.load(sums_ptr + heads * PARTS + part, mask=in_group, other=float("-inf"))
        at = shared_ptr + (heads * PARTS + part)[None, :] * SIZE + size
        mean = tl.load(at, mask=both, other=0.0)
        mean_high = tl.load(at + 1, mask=both, other=0.0) if NARROW else mean
        largest, total, low, high = _add_one(sums, mean, mean_high, largest, total, low, high, NARROW)
    return largest, total, low, high


@triton.jit
def _store(ptr, at, low, high, column, step: tl.constexpr, mask, NARROW: tl.constexpr):
    tl.store(ptr + at + step * column[:, None], low.to(ptr.dtype.element_ty), mask=mask)
    if NARROW:
        tl.store(ptr + at + step * column[:, None] + 1, high.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend_pages(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    key_scales_ptr,
    values_ptr,
    value_scales_ptr,
    out_ptr,
    sums_ptr,
    table_ptr,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    skips_ptr,
    shared_ptr,
    shared_sums_ptr,
    scale,
    q_row,
    k_row,
    v_row,
    head_tokens,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: the query heads that share one key-value head of one sequence, over one part of its tokens. With
    SHARED_PARTS, what several sequences have in common has been attended to, in so many parts."""
    head, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + slot).to(tl.int32)
    skip = tl.load(skips_ptr + row).to(tl.int32) if SHARED_PARTS > 0 else 0
    table = table_ptr + slot * table_row
    step: tl.constexpr = 2 if NARROW else 1
    width: tl.constexpr = SIZE // step
    query, column = tl.arange(0, COLUMNS), tl.arange(0, PADDED // step)
    in_group, in_width = query < GROUP, column < width
    both = in_width[:, None] & in_group[None, :]
    size = step * column[:, None]
    cos_at, sin_at = cos_ptr + position * SIZE, sin_ptr + position * SIZE
    if EARLY:
        gdc_wait()
    q_at = q_ptr + row * q_row + (head * GROUP + query[None, :]) * SIZE
    q_low = _turned(q_at, cos_at, sin_at, size, in_width[:, None], both, SIZE)
    q_high = _turned(q_at, cos_at, sin_at, size + 1, in_width[:, None], both, SIZE) if NARROW else q_low
    base = head.to(tl.int64) * head_tokens

    largest, total = tl.full([COLUMNS], float("-inf"), tl.float32), tl.zeros([COLUMNS], tl.float32)
    low = tl.zeros([PADDED // step, COLUMNS], tl.float32)
    high = tl.zeros([PADDED // step, COLUMNS], tl.float32) if NARROW else 0.0
    num_blocks = tl.cdiv(position - skip, BLOCK)
    per_part = tl.cdiv(num_blocks, PARTS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_blocks)
    # fmt: off
    largest, total, low, high = _attend_range(
        _operand(q_low, NARROW), _operand(q_high, NARROW), largest, total, low, high,
        keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table, base, skip, first, last, position, column, scale,
        width, PAGE, BLOCK, NARROW, INTERPRETED,
    )
    # fmt: on
    heads = row * HEADS + head * GROUP + query
    if part == PARTS - 1:
        # The new token: it is in nobody's cache yet, so it goes there from here.
        new = step * column
        k_at, v_at = k_ptr + row * k_row + head * SIZE, v_ptr + row * v_row + head * SIZE
        k_low = _turned(k_at, cos_at, sin_at, new, in_width, in_width, SIZE)
        k_high = _turned(k_at, cos_at, sin_at, new + 1, in_width, in_width, SIZE) if NARROW else k_low
        v_low = tl.load(v_at + new, mask=in_width, other=0.0)
        v_high = tl.load(v_at + new + 1, mask=in_width, other=0.0) if NARROW else v_low
        where = base + tl.load(table + position // PAGE).to(tl.int64) * PAGE + position % PAGE
        k_low, k_high = _put(k_low, k_high, keys_ptr, key_scales_ptr, where, column, in_width, width, NARROW)
        v_low, v_high = _put(v_low, v_high, values_ptr, value_scales_ptr, where, column, in_width, width, NARROW)
        score = tl.sum(q_low.to(tl.float32) * k_low[:, None], axis=0)
        if NARROW:
            score += tl.sum(q_high.to(tl.float32) * k_high[:, None], axis=0)
        # fmt: off
        largest, total, low, high = _add_one(
            score * scale, v_low[:, None], v_high[:, None], largest, total, low, high, NARROW
        )
        # fmt: on
        if skip > 0:
            # fmt: off
            largest, total, low, high = _add_shared(
                shared_ptr, shared_sums_ptr, heads, in_group, size, both, largest, total, low, high,
                SIZE, SHARED_PARTS, NARROW,
            )
            # fmt: on

    inverse = (1.0 / tl.where(total > 0, total, 1.0))[None, :]
    at = (heads[None, :] * PARTS + part) * SIZE
    _store(out_ptr, at, low * inverse, high * inverse, column, step, both, NARROW)
    if PARTS > 1:
        log_total = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
        tl.store(sums_ptr + heads * PARTS + part, log_total, mask=in_group)


@triton.jit
def _attend_shared(
    q_ptr,
    keys_ptr,
    key_scales_ptr,
    values_ptr,
    value_scales_ptr,
    out_ptr,
    sums_ptr,
    table_ptr,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    firsts_ptr,
    counts_ptr,
    skips_ptr,
    scale,
    q_row,
    head_tokens,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: the query heads that share one key-value head, of all sequences that begin with the same pages, over one
    part of these pages. They are read once for all of them."""
    head, reading, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if EARLY:  # also those who have nothing to do: a kernel that ends must not be ahead of the one before
        gdc_wait()
    count = tl.load(counts_ptr + reading)
    if count == 0:
        return
    first_row = tl.load(firsts_ptr + reading)
    step: tl.constexpr = 2 if NARROW else 1
    width: tl.constexpr = SIZE // step
    query, column = tl.arange(0, COLUMNS), tl.arange(0, PADDED // step)
    member, in_width = query // GROUP, column < width
    valid = (member < count) & (member < MEMBERS)
    both = in_width[:, None] & valid[None, :]
    size = step * column[:, None]
    rows = first_row + tl.where(valid, member, 0)
    angle = tl.load(positions_ptr + tl.load(slots_ptr + rows))[None, :] * SIZE
    heads = head * GROUP + query % GROUP
    q_at = q_ptr + rows[None, :] * q_row + heads[None, :] * SIZE
    q_low = _turned(q_at, cos_ptr + angle, sin_ptr + angle, size, both, both, SIZE)
    q_high = _turned(q_at, cos_ptr + angle, sin_ptr + angle, size + 1, both, both, SIZE) if NARROW else q_low

    base = head.to(tl.int64) * head_tokens
    table = table_ptr + tl.load(slots_ptr + first_row) * table_row
    end = tl.load(skips_ptr + first_row).to(tl.int32)
    largest, total = tl.full([COLUMNS], float("-inf"), tl.float32), tl.zeros([COLUMNS], tl.float32)
    low = tl.zeros([PADDED // step, COLUMNS], tl.float32)
    high = tl.zeros([PADDED // step, COLUMNS], tl.float32) if NARROW else 0.0
    num_blocks = tl.cdiv(end, BLOCK)
    per_part = tl.cdiv(num_blocks, PARTS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_blocks)
    # fmt: off
    largest, total, low, high = _attend_range(
        _operand(q_low, NARROW), _operand(q_high, NARROW), largest, total, low, high,
        keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table, base, 0, first, last, end, column, scale,
        width, PAGE, BLOCK, NARROW, INTERPRETED,
    )
    # fmt: on
    inverse = (1.0 / tl.where(total > 0, total, 1.0))[None, :]
    at = (rows * HEADS + heads) * PARTS + part
    _store(out_ptr, at[None, :] * SIZE, low * inverse, high * inverse, column, step, both, NARROW)
    log_total = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
    tl.store(sums_ptr + at, log_total, mask=valid)


@triton.jit
def _join_parts(parts_ptr, sums_ptr, out_ptr, SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    at = tl.program_id(0)
    part = tl.arange(0, PARTS)
    size = tl.arange(0, PADDED)
    in_size = size < SIZE
    sums = tl.load(sums_ptr + at * PARTS + part)
    weight = tl.exp2(sums - tl.max(sums, axis=0))
    parts = tl.load(parts_ptr + (at * PARTS + part[:, None]) * SIZE + size[None, :], mask=in_size[None, :], other=0.0)
    joined = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out_ptr + at * SIZE + size, joined.to(out_ptr.dtype.element_ty), mask=in_size)


def attend_pages(
    qkv: tuple[Tensor, Tensor, Tensor],
    keys: Pages,
    values: Pages,
    table_SP: Tensor,
    slots_B: Tensor,
    positions_S: Tensor,
    rope: Rope,
    readings: Readings | None = None,
    how: Tiling | None = None,
    shared_how: Tiling | None = None,
) -> Tensor:
    """Write each row's new key and value to its page, and attend to all pages up to there.

    `qkv` come as the product made them, [B, 1, heads, D]; `rope` holds cos and sin of every position, [T, 1, D] in fp32."""
    rows, _, heads, size = qkv[0].shape
    kv_heads, num_pages, page_tokens, _ = keys.values_KPTD.shape
    group, head_tokens, scale = heads // kv_heads, num_pages * page_tokens, size**-0.5 * math.log2(math.e)
    columns = max(_MIN_COLUMNS, triton.next_power_of_2(group))
    sizes = {
        "HEADS": heads,
        "GROUP": group,
        "SIZE": size,
        "PADDED": max((2 if keys.narrow else 1) * _MIN_INNER, triton.next_power_of_2(size)),
        "PAGE": page_tokens,
        "NARROW": keys.narrow,
        "INTERPRETED": _INTERPRETED,
    }
    parts = 1 if readings else _num_parts(rows * kv_heads)
    out = torch.empty(rows, 1, heads, size, dtype=qkv[0].dtype, device=table_SP.device)
    partial = out if parts == 1 else torch.empty(rows, heads, parts, size, dtype=torch.float32, device=out.device)
    sums = torch.empty(rows, heads, parts, dtype=torch.float32, device=out.device)
    shared, shared_sums = partial, sums  # anything, where nothing is shared
    if readings:
        shared = torch.empty(rows, heads, _SHARED_PARTS, size, dtype=torch.float32, device=out.device)
        shared_sums = torch.empty(rows, heads, _SHARED_PARTS, dtype=torch.float32, device=out.device)
        members = members_of_reading(group)
        together = max(_MIN_COLUMNS, triton.next_power_of_2(members * group))
        _attend_shared[(kv_heads, rows, _SHARED_PARTS)](
            qkv[0],
            *_pointers(keys),
            *_pointers(values),
            shared,
            shared_sums,
            table_SP,
            slots_B,
            positions_S,
            *rope,
            *readings,
            scale,
            qkv[0].stride(0),
            head_tokens,
            table_SP.stride(0),
            MEMBERS=members,
            COLUMNS=together,
            PARTS=_SHARED_PARTS,
            **sizes,
            **(shared_how or tiling(size, together, narrow=keys.narrow, shared=True)).options,
        )
    _attend_pages[(kv_heads, rows, parts)](
        *qkv,
        *_pointers(keys),
        *_pointers(values),
        partial,
        sums,
        table_SP,
        slots_B,
        positions_S,
        *rope,
        readings.skips_B if readings else slots_B,
        shared,
        shared_sums,
        scale,
        *(part.stride(0) for part in qkv),
        head_tokens,
        table_SP.stride(0),
        COLUMNS=columns,
        PARTS=parts,
        SHARED_PARTS=_SHARED_PARTS if readings else 0,
        **sizes,
        **(how or tiling(size, columns, narrow=keys.narrow)).options,
    )
    if parts > 1:
        padded = triton.next_power_of_2(size)
        _join_parts[(rows * heads,)](partial, sums, out, SIZE=size, PADDED=padded, PARTS=parts, num_warps=4)
    return out


def _pointers(pages: Pages) -> tuple[Tensor, Tensor]:
    """fp8 as pairs of values, and the scales (or anything)."""
    if pages.scales_KPT is None:
        return pages.values_KPTD, pages.values_KPTD
    return pages.values_KPTD.view(torch.int16), pages.scales_KPT


def _num_parts(programs: int) -> int:
    return min(_MAX_PARTS, 1 << (max(1, _BUSY_PROGRAMS // programs) - 1).bit_length())
