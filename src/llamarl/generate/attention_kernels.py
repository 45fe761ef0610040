"""Decode attention over pages in Triton, the twin of `attention.DecodeAttention`.

One kernel does everything between the product that makes queries, keys and values and the product that reads attention's
result: it rotates query and key, attends, and writes the new key and value to their page. Imported only where a GPU decodes.
All shapes follow from the batch and the model, so a captured graph serves any content.

Tokens are the rows of a product and query heads its columns, so a tensor core wastes little, and one warp does a block alone,
without synchronizing. The new token comes last, so that reading the cache begins at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.generate.attention import Readings, members_of_reading
from llamarl.generate.attention_blocks import (
    INTERPRETED,
    add_one,
    add_shared,
    attend_range,
    capped,
    new_token,
    operand,
    padded_size,
    put,
    score_cap,
    score_scale,
    store,
    turned,
)
from llamarl.generate.kv_cache import Pages
from llamarl.generate.kv_splits import OWN_TOKENS, PART_TOKENS, SharedCut, parts_of_all
from llamarl.generate.page_kernels import write_new
from llamarl.model.ops import Rope
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions

_MIN_COLUMNS = 8  # least columns of a tensor core's product; here they are query heads


class Tiling(NamedTuple):
    """How a kernel splits its work."""

    block: int  # tokens of the cache read at once
    warps: int
    stages: int
    parts: int = 0  # most parts that a sequence is split into; 0: as many as keep a GPU busy
    least: int = 1  # least blocks of a part, so that only long sequences are split

    @property
    def options(self) -> dict[str, int]:
        return {"BLOCK": self.block, "num_warps": self.warps, "num_stages": self.stages}


def tiling(head_dim: int, columns: int, *, narrow: bool = False, parts: int = 0) -> Tiling:
    """The fastest tiling, as measured by benchmarks/attention_variants.py. `columns`: query heads side by side; many leave no
    registers for one warp. `parts`: most parts of a sequence far longer than others, which would be read alone in the end."""
    if columns > 16:
        return Tiling(16, 4, 4)
    if narrow:
        return _cutting(Tiling(32, 1, 2), parts)
    return _cutting(Tiling(16, 1, 3 if parts or head_dim <= 64 else 4), parts)


def shared_tiling(cut: SharedCut) -> Tiling:
    """Likewise, for pages that several sequences share."""
    return Tiling(cut.block, 4, 4 if cut.block == 16 else 3, cut.parts)


def _cutting(how: Tiling, parts: int) -> Tiling:
    return how._replace(parts=parts, least=PART_TOKENS // how.block) if parts else how


@triton.jit
def _cut(tokens, BLOCK: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr):
    """Number of blocks of the sequence, of blocks of one part, and of parts."""
    num_blocks = tl.cdiv(tokens, BLOCK)
    per_part = tl.maximum(tl.cdiv(num_blocks, PARTS), LEAST)
    return num_blocks, per_part, tl.maximum(tl.cdiv(num_blocks, per_part), 1)


@triton.jit
def _begin(position, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """First token to read: where the block begins that holds the first token of the window. A window of one token is the new
    one, which is not read."""
    begin = position
    if WINDOW > 1:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK * BLOCK
    return begin


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
    partial_ptr,
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
    LEAST: tl.constexpr,
    NARROW: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROTATED: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program: the query heads that share one key-value head of one sequence, over one part of its tokens. Long
    sequences come first. With SHARED_PARTS, tokens shared by several sequences were attended to before, in so many parts."""
    head, row, part = tl.program_id(0), tl.program_id(1), PARTS - 1 - tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + slot).to(tl.int32)
    skip = tl.load(skips_ptr + row).to(tl.int32) if SHARED_PARTS > 0 else 0
    begin = skip if WINDOW == 0 else _begin(position, BLOCK, WINDOW)
    num_blocks, per_part, parts = _cut(position - begin, BLOCK, PARTS, LEAST)
    if PARTS > 1:  # noqa: SIM102 (known when it is compiled)
        if part >= parts:
            return
    table = table_ptr + slot * table_row
    step: tl.constexpr = 2 if NARROW else 1
    width: tl.constexpr = SIZE // step
    query, column = tl.arange(0, COLUMNS), tl.arange(0, PADDED // step)
    in_group, in_width = query < GROUP, column < width
    both = in_width[:, None] & in_group[None, :]
    size = step * column[:, None]
    cos_at, sin_at = cos_ptr + position * ROTATED, sin_ptr + position * ROTATED
    q_at = q_ptr + row * q_row + (head * GROUP + query[None, :]) * SIZE
    q_low = turned(q_at, cos_at, sin_at, size, in_width[:, None], both, SIZE, ROTATED)
    q_high = turned(q_at, cos_at, sin_at, size + 1, in_width[:, None], both, SIZE, ROTATED) if NARROW else q_low
    base = head.to(tl.int64) * head_tokens

    largest, total = tl.full([COLUMNS], float("-inf"), tl.float32), tl.zeros([COLUMNS], tl.float32)
    low = tl.zeros([PADDED // step, COLUMNS], tl.float32)
    high = tl.zeros([PADDED // step, COLUMNS], tl.float32) if NARROW else 0.0
    first = part * per_part
    last = tl.minimum(first + per_part, num_blocks)
    # fmt: off
    largest, total, low, high = attend_range(
        operand(q_low, NARROW), operand(q_high, NARROW), largest, total, low, high,
        keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table, base, begin, first, last, position, column, scale,
        width, PAGE, BLOCK, NARROW, INTERPRETED, CAP, WINDOW,
    )
    # fmt: on
    heads = row * HEADS + head * GROUP + query
    if part == parts - 1:
        # The new token is not in the cache yet; it is written there from here.
        k_at, v_at = k_ptr + row * k_row + head * SIZE, v_ptr + row * v_row + head * SIZE
        k_low, k_high, v_low, v_high = new_token(
            k_at, v_at, cos_at, sin_at, step * column, in_width, SIZE, ROTATED, NARROW
        )
        where = base + tl.load(table + position // PAGE).to(tl.int64) * PAGE + position % PAGE
        k_low, k_high = put(k_low, k_high, keys_ptr, key_scales_ptr, where, column, in_width, width, NARROW)
        v_low, v_high = put(v_low, v_high, values_ptr, value_scales_ptr, where, column, in_width, width, NARROW)
        score = tl.sum(q_low.to(tl.float32) * k_low[:, None], axis=0)
        if NARROW:
            score += tl.sum(q_high.to(tl.float32) * k_high[:, None], axis=0)
        # fmt: off
        largest, total, low, high = add_one(
            capped(score * scale, CAP), v_low[:, None], v_high[:, None], largest, total, low, high, NARROW
        )
        # fmt: on
        if skip > 0:
            # fmt: off
            largest, total, low, high = add_shared(
                shared_ptr, shared_sums_ptr, heads, in_group, size, both, largest, total, low, high,
                SIZE, SHARED_PARTS, NARROW,
            )
            # fmt: on

    inverse = (1.0 / tl.where(total > 0, total, 1.0))[None, :]
    whole = parts == 1 if PARTS > 1 else True
    if whole:
        store(out_ptr, heads[None, :] * SIZE, low * inverse, high * inverse, column, step, both, NARROW)
    else:
        at = heads * PARTS + part
        store(partial_ptr, at[None, :] * SIZE, low * inverse, high * inverse, column, step, both, NARROW)
        log_total = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
        tl.store(sums_ptr + at, log_total, mask=in_group)


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
    ROTATED: tl.constexpr,
    CAP: tl.constexpr,
):
    """One program: the query heads that share one key-value head, of all sequences that begin with the same pages, over one
    part of these pages, which are read once for all."""
    head, reading, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    angle = tl.load(positions_ptr + tl.load(slots_ptr + rows))[None, :] * ROTATED
    heads = head * GROUP + query % GROUP
    q_at = q_ptr + rows[None, :] * q_row + heads[None, :] * SIZE
    q_low = turned(q_at, cos_ptr + angle, sin_ptr + angle, size, both, both, SIZE, ROTATED)
    q_high = turned(q_at, cos_ptr + angle, sin_ptr + angle, size + 1, both, both, SIZE, ROTATED) if NARROW else q_low

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
    largest, total, low, high = attend_range(
        operand(q_low, NARROW), operand(q_high, NARROW), largest, total, low, high,
        keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, table, base, 0, first, last, end, column, scale,
        width, PAGE, BLOCK, NARROW, INTERPRETED, CAP,
    )
    # fmt: on
    inverse = (1.0 / tl.where(total > 0, total, 1.0))[None, :]
    at = (rows * HEADS + heads) * PARTS + part
    store(out_ptr, at[None, :] * SIZE, low * inverse, high * inverse, column, step, both, NARROW)
    log_total = tl.where(total > 0, largest + tl.log2(total), float("-inf"))
    tl.store(sums_ptr + at, log_total, mask=valid)


@triton.jit
def _join_parts(
    partial_ptr,
    sums_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    skips_ptr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One program: the query heads that share one key-value head of one sequence, if it was split."""
    head, row = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_ptr + tl.load(slots_ptr + row)).to(tl.int32)
    skip = tl.load(skips_ptr + row).to(tl.int32) if SHARED else 0
    begin = skip if WINDOW == 0 else _begin(position, BLOCK, WINDOW)
    _, _, parts = _cut(position - begin, BLOCK, PARTS, LEAST)
    if parts == 1:
        return
    query, part, size = tl.arange(0, COLUMNS), tl.arange(0, PARTS), tl.arange(0, PADDED)
    heads, in_group, in_size = row * HEADS + head * GROUP + query, query < GROUP, size < SIZE
    at = heads[:, None] * PARTS + part[None, :]
    there = in_group[:, None] & (part < parts)[None, :]
    sums = tl.load(sums_ptr + at, mask=there, other=float("-inf"))
    weight = tl.where(there, tl.exp2(sums - tl.max(sums, axis=1)[:, None]), 0.0)
    inside = there[:, :, None] & in_size[None, None, :]
    found = tl.load(partial_ptr + at[:, :, None] * SIZE + size[None, None, :], mask=inside, other=0.0)
    total = tl.where(in_group, tl.sum(weight, axis=1), 1.0)
    joined = tl.sum(found * weight[:, :, None], axis=1) / total[:, None]
    out = out_ptr + heads[:, None] * SIZE + size[None, :]
    tl.store(out, joined.to(out_ptr.dtype.element_ty), mask=in_group[:, None] & in_size[None, :])


def attend_pages(
    qkv: tuple[Tensor, Tensor, Tensor],
    keys: Pages,
    values: Pages,
    table_SP: Tensor,
    slots_B: Tensor,
    positions_S: Tensor,
    rope: Rope,
    readings: Readings | None = None,
    *,
    parts: int = 0,
    how: Tiling | None = None,
    shared_how: Tiling | None = None,
    drafted: bool = False,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> Tensor:
    """Write each row's new key and value to its page, and attend to all tokens up to it, or to those in the window. With
    `drafted`, rows may hold the same sequence at different positions: then all are written before any is read.

    `qkv` are as the product made them, [B, 1, heads, D]; `rope` holds cos and sin of every position, [T, 1, D] in fp32."""
    rows, _, heads, size = qkv[0].shape
    kv_heads, num_pages, page_tokens, _ = keys.values_KPTD.shape
    assert not (readings and options.window), "each sequence sees another part of shared pages through a window"
    group, head_tokens = heads // kv_heads, num_pages * page_tokens
    scale = score_scale(size, options)
    columns = max(_MIN_COLUMNS, triton.next_power_of_2(group))
    sizes = {
        "HEADS": heads,
        "GROUP": group,
        "SIZE": size,
        "PADDED": padded_size(size, narrow=keys.narrow),
        "PAGE": page_tokens,
        "NARROW": keys.narrow,
        "INTERPRETED": INTERPRETED,
        "ROTATED": rope[0].shape[-1],
        "CAP": score_cap(options),
    }
    how = how or tiling(size, columns, narrow=keys.narrow, parts=parts)
    if readings and how.least == 1:  # what is a row's own is often too short to be split
        how = how._replace(least=OWN_TOKENS // how.block)
    num_parts = how.parts or parts_of_all(rows * kv_heads)
    out = torch.empty(rows, 1, heads, size, dtype=qkv[0].dtype, device=table_SP.device)
    partial = (
        out if num_parts == 1 else torch.empty(rows, heads, num_parts, size, dtype=torch.float32, device=out.device)
    )
    sums = torch.empty(rows, heads, num_parts, dtype=torch.float32, device=out.device)
    skips_B = readings.skips_B if readings else slots_B  # any tensors, if nothing is shared
    shared, shared_sums, shared_parts = partial, sums, 0
    if readings:
        members = members_of_reading(group)
        together = max(_MIN_COLUMNS, triton.next_power_of_2(members * group))
        shared_how = shared_how or shared_tiling(readings.cut)
        shared_parts = shared_how.parts
        shared = torch.empty(rows, heads, shared_parts, size, dtype=torch.float32, device=out.device)
        shared_sums = torch.empty(rows, heads, shared_parts, dtype=torch.float32, device=out.device)
        most = max(1, rows // 2)  # readings: each serves two rows at least
        _attend_shared[(kv_heads, most, shared_parts)](
            qkv[0],
            *keys.pointers,
            *values.pointers,
            shared,
            shared_sums,
            table_SP,
            slots_B,
            positions_S,
            *rope,
            *readings[:3],
            scale,
            qkv[0].stride(0),
            head_tokens,
            table_SP.stride(0),
            MEMBERS=members,
            COLUMNS=together,
            PARTS=shared_parts,
            **sizes,
            **shared_how.options,
        )
    if drafted:
        write_new(qkv[1], qkv[2], keys, values, table_SP, slots_B, positions_S, rope)
    _attend_pages[(kv_heads, rows, num_parts)](
        *qkv,
        *keys.pointers,
        *values.pointers,
        out,
        partial,
        sums,
        table_SP,
        slots_B,
        positions_S,
        *rope,
        skips_B,
        shared,
        shared_sums,
        scale,
        *(part.stride(0) for part in qkv),
        head_tokens,
        table_SP.stride(0),
        COLUMNS=columns,
        PARTS=num_parts,
        LEAST=how.least,
        SHARED_PARTS=shared_parts,
        WINDOW=options.window,
        **sizes,
        **how.options,
    )
    if num_parts > 1:
        _join_parts[(kv_heads, rows)](
            partial,
            sums,
            out,
            slots_B,
            positions_S,
            skips_B,
            HEADS=heads,
            GROUP=group,
            COLUMNS=triton.next_power_of_2(group),
            SIZE=size,
            PADDED=triton.next_power_of_2(size),
            BLOCK=how.block,
            PARTS=num_parts,
            LEAST=how.least,
            WINDOW=options.window,
            SHARED=readings is not None,
            num_warps=4,
        )
    return out
