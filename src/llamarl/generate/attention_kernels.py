"""Attention of decoding over pages in Triton, the twin of `cache.DecodeAttention`.

One kernel does all that lies between the product that makes queries, keys and values and the one that reads attention's
result: it turns query and key to their position, writes the new key and value to their page, and attends. Imported only where
a GPU decodes. All shapes follow from the batch and the model, so a captured graph serves any content.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.generate.cache import Pages, Readings, members_of_reading
from llamarl.model.ops import Rope

_BUSY_PROGRAMS = 512  # enough to keep a large GPU's memory busy; fewer sequences are cut into more parts
_MAX_PARTS = 16
_MIN_ROWS = 16  # the smallest product of a tensor core


class Tiling(NamedTuple):
    block: int  # tokens of the cache, read at once
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"BLOCK": self.block, "num_warps": self.warps, "num_stages": self.stages}


def tiling(head_dim: int, *, shared: bool = False) -> Tiling:
    """The best of eleven on an H200; the many rows of a shared reading leave registers for fewer tokens."""
    return Tiling(32 if shared and head_dim > 64 else 64, 4, 3)


@triton.jit
def _turned(at, cos, sin, size, mask, HALF: tl.constexpr):
    """`ops.rotate` of the vectors that begin at these places: each pair (i, i + HALF), rounded once."""
    partner = tl.where(size < HALF, size + HALF, size - HALF)
    sign = tl.where(size < HALF, -1.0, 1.0)
    x = tl.load(at + size, mask=mask, other=0.0)
    other = tl.load(at + partner, mask=mask, other=0.0)
    return (x.to(tl.float32) * cos + other.to(tl.float32) * (sign * sin)).to(x.dtype)


@triton.jit
def _put(x, values_ptr, scales_ptr, where, size, mask, SIZE: tl.constexpr, NARROW: tl.constexpr):
    """Write one vector to its place in the cache; returns it as it can be read there, in fp32."""
    wide = x.to(tl.float32)
    if NARROW:
        scale = tl.maximum(tl.max(tl.abs(wide), axis=0) / 448.0, 1e-12)
        tl.store(scales_ptr + where, scale)
        narrow = tl.div_rn(wide, scale).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + where * SIZE + size, narrow, mask=mask)
        return narrow.to(tl.float32) * scale
    tl.store(values_ptr + where * SIZE + size, x, mask=mask)
    return wide


@triton.jit
def _attend_block(
    q,
    largest,
    total,
    gathered,
    keys_ptr,
    key_scales_ptr,
    values_ptr,
    value_scales_ptr,
    where,
    inside,
    size,
    both,
    scale,
    SIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Softmax over the tokens so far, extended by those of one block."""
    k = tl.load(keys_ptr + where[:, None] * SIZE + size[None, :], mask=both, other=0.0).to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if NARROW:
        score *= tl.load(key_scales_ptr + where, mask=inside, other=0.0)[None, :]
    score = tl.where(inside[None, :], score, float("-inf"))
    higher = tl.maximum(largest, tl.max(score, axis=1))
    weight = tl.exp(score - higher[:, None])
    shrink = tl.exp(largest - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    v = tl.load(values_ptr + where[:, None] * SIZE + size[None, :], mask=both, other=0.0).to(q.dtype)
    if NARROW:
        weight *= tl.load(value_scales_ptr + where, mask=inside, other=0.0)[None, :]
    gathered = gathered * shrink[:, None] + tl.dot(weight.to(q.dtype), v, input_precision="ieee")
    return higher, total, gathered


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
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One program: the query heads that share one key-value head of one sequence, over one part of its tokens. With SHARED,
    what several sequences have in common has been attended to, and is gone on from."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + slot)
    query, size = tl.arange(0, ROWS), tl.arange(0, PADDED)
    in_size = size < SIZE
    half: tl.constexpr = SIZE // 2
    cos = tl.load(cos_ptr + position * SIZE + size, mask=in_size, other=0.0)
    sin = tl.load(sin_ptr + position * SIZE + size, mask=in_size, other=0.0)
    of_head = (query[:, None] < GROUP) & in_size[None, :]
    q_at = q_ptr + row * q_row + (head * GROUP + query[:, None]) * SIZE
    q = _turned(q_at, cos[None, :], sin[None, :], size[None, :], of_head, half)
    base = head.to(tl.int64) * head_tokens
    table = table_ptr + slot * table_row

    in_group = query < GROUP
    heads = row * HEADS + head * GROUP + query
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, PADDED], tl.float32)
    skip = 0
    if SHARED:
        skip = tl.load(skips_ptr + row)
        if skip > 0:
            largest = tl.load(shared_sums_ptr + heads, mask=in_group, other=0.0)
            total += 1.0
            gathered = tl.load(shared_ptr + heads[:, None] * SIZE + size[None, :], mask=of_head, other=0.0)
    num_blocks = tl.cdiv(position - skip, BLOCK)
    per_part = tl.cdiv(num_blocks, PARTS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_blocks)
    if part == PARTS - 1:
        # The new token: it is in nobody's cache yet, so it goes there from here.
        new_at = head * SIZE
        k_new = _turned(k_ptr + row * k_row + new_at, cos, sin, size, in_size, half)
        v_new = tl.load(v_ptr + row * v_row + new_at + size, mask=in_size, other=0.0)
        new_where = base + tl.load(table + position // PAGE).to(tl.int64) * PAGE + position % PAGE
        k_new = _put(k_new, keys_ptr, key_scales_ptr, new_where, size, in_size, SIZE, NARROW)
        v_new = _put(v_new, values_ptr, value_scales_ptr, new_where, size, in_size, SIZE, NARROW)
        score = tl.sum(q.to(tl.float32) * k_new[None, :], axis=1) * scale
        higher = tl.maximum(largest, score)
        weight, shrink = tl.exp(score - higher), tl.exp(largest - higher)
        total = total * shrink + weight
        gathered = gathered * shrink[:, None] + weight[:, None] * v_new[None, :]
        largest = higher
    # Pages are looked up one block ahead: only then can the loads of several blocks be under way at once.
    token = skip + first * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(table + token // PAGE, mask=token < position, other=0)
    for _ in tl.range(first, last):
        inside = token < position
        where = base + page.to(tl.int64) * PAGE + token % PAGE
        token += BLOCK
        page = tl.load(table + token // PAGE, mask=token < position, other=0)
        both = inside[:, None] & in_size[None, :]
        # fmt: off
        largest, total, gathered = _attend_block(
            q, largest, total, gathered, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
            where, inside, size, both, scale, SIZE, NARROW,
        )
        # fmt: on

    mean = gathered / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + (heads[:, None] * PARTS + part) * SIZE + size[None, :]
    tl.store(out_at, mean.to(out_ptr.dtype.element_ty), mask=of_head)
    if PARTS > 1:
        log_total = tl.where(total > 0, largest + tl.log(total), float("-inf"))
        tl.store(sums_ptr + heads * PARTS + part, log_total, mask=in_group)


@triton.jit
def _attend_shared(
    q_ptr,
    keys_ptr,
    values_ptr,
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
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the query heads that share one key-value head, of all sequences that begin with the same pages, over these
    pages. They are read once for all of them."""
    reading, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts_ptr + reading)
    if count == 0:
        return
    first_row = tl.load(firsts_ptr + reading)
    query, size = tl.arange(0, ROWS), tl.arange(0, PADDED)
    in_size = size < SIZE
    member = query // GROUP
    valid = (member < count) & (member < MEMBERS)
    both = valid[:, None] & in_size[None, :]
    rows = first_row + tl.where(valid, member, 0)
    slots = tl.load(slots_ptr + rows)
    positions = tl.load(positions_ptr + slots)
    angle = positions[:, None] * SIZE + size[None, :]
    cos = tl.load(cos_ptr + angle, mask=both, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=both, other=0.0)
    heads = head * GROUP + query % GROUP
    half: tl.constexpr = SIZE // 2
    q = _turned(q_ptr + rows[:, None] * q_row + heads[:, None] * SIZE, cos, sin, size[None, :], both, half)

    base = head.to(tl.int64) * head_tokens
    table = table_ptr + tl.load(slots_ptr + first_row) * table_row
    shared = tl.load(skips_ptr + first_row)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, PADDED], tl.float32)
    token = tl.arange(0, BLOCK)
    page = tl.load(table + token // PAGE, mask=token < shared, other=0)
    for _ in tl.range(0, tl.cdiv(shared, BLOCK)):
        inside = token < shared
        where = base + page.to(tl.int64) * PAGE + token % PAGE
        token += BLOCK
        page = tl.load(table + token // PAGE, mask=token < shared, other=0)
        # fmt: off
        largest, total, gathered = _attend_block(
            q, largest, total, gathered, keys_ptr, keys_ptr, values_ptr, values_ptr,
            where, inside, size, inside[:, None] & in_size[None, :], scale, SIZE, False,
        )
        # fmt: on
    at = rows * HEADS + heads
    tl.store(out_ptr + at[:, None] * SIZE + size[None, :], gathered / total[:, None], mask=both)
    tl.store(sums_ptr + at, largest + tl.log(total), mask=valid)


@triton.jit
def _join_parts(parts_ptr, sums_ptr, out_ptr, SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    at = tl.program_id(0)
    part = tl.arange(0, PARTS)
    size = tl.arange(0, PADDED)
    in_size = size < SIZE
    sums = tl.load(sums_ptr + at * PARTS + part)
    weight = tl.exp(sums - tl.max(sums, axis=0))
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
) -> Tensor:
    """Write each row's new key and value to its page, and attend to all pages up to there.

    `qkv` come as the product made them, [B, 1, heads, D]; `rope` holds cos and sin of every position, [T, 1, D] in fp32.
    There are no `readings` of narrow pages."""
    rows, _, heads, size = qkv[0].shape
    kv_heads, num_pages, page_tokens, _ = keys.values_KPTD.shape
    group, head_tokens, scale = heads // kv_heads, num_pages * page_tokens, size**-0.5
    sizes = {
        "HEADS": heads,
        "GROUP": group,
        "SIZE": size,
        "PADDED": max(_MIN_ROWS, triton.next_power_of_2(size)),
        "PAGE": page_tokens,
    }
    parts = 1 if readings else _num_parts(rows * kv_heads)
    out = torch.empty(rows, 1, heads, size, dtype=qkv[0].dtype, device=table_SP.device)
    partial = out if parts == 1 else torch.empty(rows, heads, parts, size, dtype=torch.float32, device=out.device)
    sums = torch.empty(rows, heads, parts, dtype=torch.float32, device=out.device)
    shared, shared_sums = partial, sums  # anything, where nothing is shared
    if readings:
        shared = torch.empty(rows, heads, size, dtype=torch.float32, device=out.device)
        shared_sums = torch.empty(rows, heads, dtype=torch.float32, device=out.device)
        members = members_of_reading(group)
        _attend_shared[(rows, kv_heads)](
            qkv[0],
            keys.values_KPTD,
            values.values_KPTD,
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
            ROWS=max(_MIN_ROWS, triton.next_power_of_2(members * group)),
            **sizes,
            **tiling(size, shared=True).options,
        )
    _attend_pages[(rows, kv_heads, parts)](
        *qkv,
        *keys.pointers,
        *values.pointers,
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
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)),
        PARTS=parts,
        NARROW=keys.narrow,
        SHARED=readings is not None,
        **sizes,
        **(how or tiling(size)).options,
    )
    if parts > 1:
        _join_parts[(rows * heads,)](partial, sums, out, SIZE=size, PADDED=sizes["PADDED"], PARTS=parts, num_warps=4)
    return out


def _num_parts(programs: int) -> int:
    return min(_MAX_PARTS, 1 << (max(1, _BUSY_PROGRAMS // programs) - 1).bit_length())
