"""Building blocks of the decode attention kernels in Triton: rotation, widening of fp8, a block of tokens, a running softmax.

The running softmax is (largest, total, low, high), with exponents to the base 2: the largest score of each query head, the
sum of its weights, and the weighted sum of values. An fp8 cache gives pairs of values, which one instruction widens in the
order of the product; `low` and `high` hold those of even and of odd place. Otherwise `low` holds all of them.
"""

from __future__ import annotations

import math
import os

import triton
import triton.language as tl

from llamarl.model.kernels import narrowed
from llamarl.model_spec import AttentionOptions

_MIN_INNER = 16  # least length of the vectors that a tensor core multiplies
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, where inline assembler cannot run


def padded_size(head_dim: int, *, narrow: bool) -> int:
    """PADDED of a kernel: columns of a head, as a power of two. An fp8 cache gives them in pairs."""
    return max((2 if narrow else 1) * _MIN_INNER, int(triton.next_power_of_2(head_dim)))


def score_cap(options: AttentionOptions) -> float:
    """CAP of a kernel, to the base 2; 0: none."""
    return options.softcap * math.log2(math.e)


def score_scale(head_dim: int, options: AttentionOptions) -> float:
    """What a product of query and key is multiplied with before `capped`."""
    factor = head_dim**-0.5 if options.scale is None else options.scale
    return factor / options.softcap if options.softcap else factor * math.log2(math.e)


@triton.jit
def turned(at, cos_at, sin_at, size, in_size, mask, SIZE: tl.constexpr, ROTATED: tl.constexpr):
    """`ops.rotate` of the vectors that begin at these places: rotates each pair (i, i + ROTATED / 2), rounded once. Features
    from ROTATED on stay as they are."""
    half: tl.constexpr = ROTATED // 2
    partner = tl.where(size < half, size + half, size - half)
    sign = tl.where(size < half, -1.0, 1.0)
    rotates = size < ROTATED
    if ROTATED < SIZE:
        partner = tl.where(rotates, partner, size)
        in_size = in_size & rotates
    x = tl.load(at + size, mask=mask, other=0.0)
    other = tl.load(at + partner, mask=mask, other=0.0)
    cos = tl.load(cos_at + size, mask=in_size, other=0.0)
    sin = tl.load(sin_at + size, mask=in_size, other=0.0)
    if ROTATED < SIZE:
        cos = tl.where(rotates, cos, 1.0)
    return (x.to(tl.float32) * cos + other.to(tl.float32) * (sign * sin)).to(x.dtype)


@triton.jit
def new_token(
    k_at, v_at, cos_at, sin_at, new, in_width, SIZE: tl.constexpr, ROTATED: tl.constexpr, NARROW: tl.constexpr
):
    """The key that begins at this place, rotated, and its value, for `put`: features `new`, with NARROW also those after
    each."""
    k_low = turned(k_at, cos_at, sin_at, new, in_width, in_width, SIZE, ROTATED)
    k_high = turned(k_at, cos_at, sin_at, new + 1, in_width, in_width, SIZE, ROTATED) if NARROW else k_low
    v_low = tl.load(v_at + new, mask=in_width, other=0.0)
    v_high = tl.load(v_at + new + 1, mask=in_width, other=0.0) if NARROW else v_low
    return k_low, k_high, v_low, v_high


@triton.jit
def operand(q, NARROW: tl.constexpr):
    """The query in the dtype of its product with the keys: fp8 keys are widened to fp16, in one instruction."""
    if NARROW and q.dtype != tl.float32:
        q = narrowed(q.to(tl.float32), tl.float16)
    return q


@triton.jit
def widened(pairs, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """The lower and the upper value of each pair of fp8 values."""
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
def put(low, high, values_ptr, scales_ptr, where, column, mask, WIDTH: tl.constexpr, NARROW: tl.constexpr):
    """Write one vector to its place in the cache; returns it as it can be read afterwards, in fp32."""
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
def capped(score, CAP: tl.constexpr):
    """Scores to the base 2. With CAP, `score` is divided by the softcap already: CAP * tanh(score), without overflow."""
    if CAP > 0:
        score = CAP - 2 * CAP / (tl.exp2(score * 2.8853900817779268) + 1.0)
    return score


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
    CAP: tl.constexpr,
):
    """The running softmax, extended by the tokens of one block. With narrow values, their scales go into the weights, which
    are taken relative to the largest of these products, so that they fit fp16."""
    k = tl.load(keys_at, mask=inside[:, None] & in_width[None, :], other=0)
    if NARROW:
        k_low, k_high = widened(k, q_low.dtype, INTERPRETED)
        score = tl.dot(k_low, q_low, input_precision="ieee")
        score = tl.dot(k_high, q_high, score, input_precision="ieee")
        score *= (tl.load(key_scales_at, mask=inside, other=0.0) * scale)[:, None]
        score = capped(score, CAP)
        v_scale = tl.load(value_scales_at, mask=inside, other=1.0)
        bound = score + tl.log2(v_scale)[:, None]
    else:
        score = capped(tl.dot(k, q_low, input_precision="ieee") * scale, CAP)
        bound = score
    higher = tl.maximum(largest, tl.max(tl.where(inside[:, None], bound, float("-inf")), axis=0))
    weight = tl.exp2(tl.where(inside[:, None], score, float("-inf")) - higher[None, :])
    shrink = tl.exp2(largest - higher)
    total = total * shrink + tl.sum(weight, axis=0)
    v = tl.load(values_at, mask=in_width[:, None] & inside[None, :], other=0)
    if NARROW:
        v_low, v_high = widened(v, q_low.dtype, INTERPRETED)
        weight = (weight * v_scale[:, None]).to(q_low.dtype)
        low = tl.dot(v_low, weight, low * shrink[None, :], input_precision="ieee")
        high = tl.dot(v_high, weight, high * shrink[None, :], input_precision="ieee")
    else:
        low = tl.dot(v, weight.to(v.dtype), low * shrink[None, :], input_precision="ieee")
    return higher, total, low, high


@triton.jit
def attend_range(
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
    CAP: tl.constexpr = 0.0,
    WINDOW: tl.constexpr = 0,
):
    """The running softmax, extended by blocks `first` to before `last` of the tokens from `begin`, where a block of a page
    begins, to before `end`; with WINDOW, by the latest WINDOW - 1 of them. Pages are looked up one block ahead: only then can
    the loads of several blocks overlap."""
    within = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    one_page: tl.constexpr = PAGE % BLOCK == 0
    ahead = begin + first * BLOCK if one_page else begin + first * BLOCK + within
    page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
    for block in tl.range(first, last):
        start = begin + block * BLOCK
        inside = start + within < end
        if WINDOW > 0:
            inside = inside & (start + within > end - WINDOW)
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
            inside, in_width, scale, NARROW, INTERPRETED, CAP,
        )
        # fmt: on
    return largest, total, low, high


@triton.jit
def add_one(score, v_low, v_high, largest, total, low, high, NARROW: tl.constexpr):
    """The running softmax, extended by one token, or by the mean of several whose sum of weights has this logarithm."""
    higher = tl.maximum(largest, score)
    weight, shrink = tl.exp2(score - higher), tl.exp2(largest - higher)
    total = total * shrink + weight
    low = low * shrink[None, :] + v_low * weight[None, :]
    if NARROW:
        high = high * shrink[None, :] + v_high * weight[None, :]
    return higher, total, low, high


@triton.jit
def add_shared(
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
    """The running softmax, extended by the results of `_attend_shared`."""
    for part in tl.static_range(PARTS):
        sums = tl.load(sums_ptr + heads * PARTS + part, mask=in_group, other=float("-inf"))
        at = shared_ptr + (heads * PARTS + part)[None, :] * SIZE + size
        mean = tl.load(at, mask=both, other=0.0)
        mean_high = tl.load(at + 1, mask=both, other=0.0) if NARROW else mean
        largest, total, low, high = add_one(sums, mean, mean_high, largest, total, low, high, NARROW)
    return largest, total, low, high


@triton.jit
def store(ptr, at, low, high, column, step: tl.constexpr, mask, NARROW: tl.constexpr):
    tl.store(ptr + at + step * column[:, None], low.to(ptr.dtype.element_ty), mask=mask)
    if NARROW:
        tl.store(ptr + at + step * column[:, None] + 1, high.to(ptr.dtype.element_ty), mask=mask)
