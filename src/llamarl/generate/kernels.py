"""Triton kernels of decoding, each the twin of a plain function: attention over pages (`cache.attend_pages`), filters
(`sampling.least_kept`), and drawing with the bookkeeping of the slots (`sampling.sample_tokens`, `SlotState.advance`).

Imported only where a GPU decodes. All shapes follow from the batch and the model, so a captured graph serves any content.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.generate.slots import SlotState

_BUSY_PROGRAMS = 512  # enough to keep a large GPU's memory busy; fewer sequences are cut into more parts
_MAX_PARTS = 16
_VOCABULARY_BLOCK = 4096
_BLOCK_TOKENS = 64  # of the cache, read at once
_MIN_ROWS = 16  # the smallest product of a tensor core


@triton.jit
def _attend_pages(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    sums_ptr,
    table_ptr,
    slots_ptr,
    positions_ptr,
    scale,
    q_row,
    k_row,
    v_row,
    pages_row,
    table_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program: the query heads that share one key-value head of one sequence, over one part of its tokens."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    query = tl.arange(0, ROWS)
    size = tl.arange(0, PADDED)
    in_size = size < SIZE
    q_at = row * q_row + (head * GROUP + query[:, None]) * SIZE + size[None, :]
    q = tl.load(q_ptr + q_at, mask=(query[:, None] < GROUP) & in_size[None, :], other=0.0)
    base = head.to(tl.int64) * pages_row
    table = table_ptr + slot * table_row

    num_blocks = tl.cdiv(position, BLOCK)
    per_part = tl.cdiv(num_blocks, PARTS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_blocks)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, PADDED], tl.float32)
    if part == PARTS - 1:
        # The new token: it is in nobody's cache yet, so it goes there from here.
        new_at = head * SIZE + size
        k_new = tl.load(k_ptr + row * k_row + new_at, mask=in_size, other=0.0)
        v_new = tl.load(v_ptr + row * v_row + new_at, mask=in_size, other=0.0)
        page = tl.load(table + position // PAGE).to(tl.int64)
        to = base + (page * PAGE + position % PAGE) * SIZE + size
        tl.store(keys_ptr + to, k_new, mask=in_size)
        tl.store(values_ptr + to, v_new, mask=in_size)
        largest = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale
        total = total + 1.0
        gathered = gathered + v_new.to(tl.float32)[None, :]
    for block in tl.range(first, last):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < position
        pages = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
        at = base + (pages * PAGE + token % PAGE) * SIZE
        both = inside[:, None] & in_size[None, :]
        k = tl.load(keys_ptr + at[:, None] + size[None, :], mask=both, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(largest - higher)
        v = tl.load(values_ptr + at[:, None] + size[None, :], mask=both, other=0.0)
        gathered = gathered * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weight, axis=1)
        largest = higher

    in_group = query < GROUP
    heads = head * GROUP + query
    out_at = ((row * HEADS + heads[:, None]) * PARTS + part) * SIZE + size[None, :]
    mean = gathered / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + out_at, mean.to(out_ptr.dtype.element_ty), mask=in_group[:, None] & in_size[None, :])
    if PARTS > 1:
        log_total = tl.where(total > 0, largest + tl.log(total), float("-inf"))
        tl.store(sums_ptr + (row * HEADS + heads) * PARTS + part, log_total, mask=in_group)


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
    q_B1HD: Tensor,
    k_B1KD: Tensor,
    v_B1KD: Tensor,
    keys_KPTD: Tensor,
    values_KPTD: Tensor,
    table_SP: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
) -> Tensor:
    """Write each row's new key and value to its page, and attend to all pages up to there."""
    rows, _, heads, size = q_B1HD.shape
    kv_heads, page_tokens = keys_KPTD.shape[0], keys_KPTD.shape[2]
    parts = _num_parts(rows * kv_heads)
    out = torch.empty(rows, 1, heads, size, dtype=q_B1HD.dtype, device=q_B1HD.device)
    partial = out if parts == 1 else torch.empty(rows, heads, parts, size, dtype=torch.float32, device=out.device)
    sums = torch.empty(rows, heads, parts, dtype=torch.float32, device=out.device)
    padded = max(_MIN_ROWS, triton.next_power_of_2(size))
    _attend_pages[(rows, kv_heads, parts)](
        q_B1HD,
        k_B1KD,
        v_B1KD,
        keys_KPTD,
        values_KPTD,
        partial,
        sums,
        table_SP,
        slots_B,
        positions_B,
        size**-0.5,
        q_B1HD.stride(0),
        k_B1KD.stride(0),
        v_B1KD.stride(0),
        keys_KPTD.stride(0),
        table_SP.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(heads // kv_heads)),
        SIZE=size,
        PADDED=padded,
        PAGE=page_tokens,
        BLOCK=_BLOCK_TOKENS,
        PARTS=parts,
        num_warps=4,
        num_stages=3,
    )
    if parts > 1:
        _join_parts[(rows * heads,)](partial, sums, out, SIZE=size, PADDED=padded, PARTS=parts, num_warps=4)
    return out


def _num_parts(programs: int) -> int:
    return min(_MAX_PARTS, 1 << (max(1, _BUSY_PROGRAMS // programs) - 1).bit_length())


@triton.jit
def _mix(x):
    mask = (1 << 63) - 1
    x = x & mask
    x = ((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x14D049BB133111EB) & mask
    return x ^ (x >> 31)


@triton.jit
def _draw(seed_state, ordinal, sample, position):
    """`sampling.uniform_draws`, whose first step, the seed's, is done on the host."""
    golden: tl.constexpr = 0x1E3779B97F4A7C15
    state = _mix(seed_state + _mix(ordinal + golden))
    state = _mix(state + _mix(sample + golden))
    state = _mix(state + _mix(position + golden))
    return (state >> 10).to(tl.float64) / 9007199254740992.0


@triton.jit
def _scaled(logits_ptr, row, vocabulary, columns, temperature, least):
    """Scores as they are sampled from: divided by the temperature, and minus infinity where a filter left them out."""
    score = tl.load(
        logits_ptr + row.to(tl.int64) * vocabulary + columns, mask=columns < vocabulary, other=float("-inf")
    )
    score = tl.div_rn(score, tl.where(temperature == 0, 1.0, temperature))
    return tl.where(score >= least, score, float("-inf"))


@triton.jit
def _summarise(
    logits_ptr,
    slots_ptr,
    temperatures_ptr,
    least_ptr,
    sums_ptr,
    largest_ptr,
    where_ptr,
    vocabulary,
    blocks,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """For each block of each row: its largest score and where it is, and the sum of exp(score - largest)."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + tl.load(slots_ptr + row))
    least = tl.load(least_ptr + row) if FILTERED else float("-inf")
    columns = block * BLOCK + tl.arange(0, BLOCK)
    score = _scaled(logits_ptr, row, vocabulary, columns, temperature, least)
    largest = tl.max(score, axis=0)
    safe = tl.where(largest > float("-inf"), largest, 0.0)
    tl.store(sums_ptr + row * blocks + block, tl.sum(tl.exp(score - safe), axis=0))
    tl.store(largest_ptr + row * blocks + block, largest)
    tl.store(where_ptr + row * blocks + block, tl.min(tl.where(score == largest, columns, 2147483647), axis=0))


@triton.jit
def _pick(
    logits_ptr,
    slots_ptr,
    temperatures_ptr,
    least_ptr,
    sums_ptr,
    largest_ptr,
    where_ptr,
    ordinals_ptr,
    samples_ptr,
    counts_ptr,
    positions_ptr,
    tokens_ptr,
    limits_ptr,
    active_ptr,
    eos_ptr,
    version_ptr,
    out_tokens_ptr,
    out_logprobs_ptr,
    out_versions_ptr,
    seed_state,
    vocabulary,
    blocks,
    num_eos,
    max_new,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EOS: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """One row: which block the draw falls in, which token of it, its log-prob; then what the slot is after it."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if tl.load(active_ptr + slot) == 0:
        return
    temperature = tl.load(temperatures_ptr + slot)
    least = tl.load(least_ptr + row) if FILTERED else float("-inf")
    count = tl.load(counts_ptr + slot)
    draw = _draw(seed_state, tl.load(ordinals_ptr + slot), tl.load(samples_ptr + slot), count)

    index = tl.arange(0, BLOCKS)
    inside = index < blocks
    largest = tl.load(largest_ptr + row * blocks + index, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + row * blocks + index, mask=inside, other=0.0)
    top = tl.max(largest, axis=0)
    mass = sums * tl.exp(largest - top)
    mass = tl.where(mass > 0, mass, 0.0)
    upto = tl.cumsum(mass, axis=0)
    total = tl.sum(mass, axis=0)
    target = (draw * total.to(tl.float64)).to(tl.float32)
    has_mass = tl.where(mass > 0, index, -1)
    block = tl.min(tl.where((upto > target) & (mass > 0), index, BLOCKS), axis=0)
    block = tl.where(block < BLOCKS, block, tl.max(has_mass, axis=0))
    before = tl.sum(tl.where(index < block, mass, 0.0), axis=0)

    columns = block * BLOCK + tl.arange(0, BLOCK)
    score = _scaled(logits_ptr, row, vocabulary, columns, temperature, least)
    weight = tl.exp(score - top)
    within = tl.cumsum(weight, axis=0)
    token = tl.min(tl.where((within > target - before) & (weight > 0), columns, 2147483647), axis=0)
    token = tl.where(token < vocabulary, token, tl.max(tl.where(weight > 0, columns, 0), axis=0))
    likeliest = tl.load(where_ptr + row * blocks + index, mask=inside, other=0)
    greedy = tl.min(tl.where(inside & (largest == top), likeliest, 2147483647), axis=0)
    token = tl.where(temperature == 0, greedy, token)
    chosen = tl.load(logits_ptr + row.to(tl.int64) * vocabulary + token) / tl.where(temperature == 0, 1.0, temperature)
    logprob = chosen - top - tl.log(total)

    at = slot * max_new + count
    tl.store(out_tokens_ptr + at, token)
    tl.store(out_logprobs_ptr + at, logprob)
    tl.store(out_versions_ptr + at, tl.load(version_ptr))
    stops = tl.arange(0, EOS)
    stop = tl.load(eos_ptr + stops, mask=stops < num_eos, other=-1)
    ended = (tl.max((stop == token).to(tl.int32), axis=0) > 0) | (count + 1 >= tl.load(limits_ptr + slot))
    tl.store(counts_ptr + slot, count + 1)
    tl.store(positions_ptr + slot, tl.load(positions_ptr + slot) + 1)
    tl.store(tokens_ptr + slot, token.to(tl.int64))
    tl.store(active_ptr + slot, (~ended).to(tl.int1))


@triton.jit
def _rank(score):
    """A whole number for every score, in the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _mass_above(logits_ptr, row, vocabulary, temperature, top, least_rank, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """How many scores are at least so high, or how much they weigh together."""
    found = 0.0
    for start in tl.range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = _scaled(logits_ptr, row, vocabulary, columns, temperature, float("-inf"))
        kept = (_rank(score) >= least_rank) & (columns < vocabulary)
        found += tl.sum(tl.where(kept, 1.0 if COUNT else tl.exp(score - top), 0.0), axis=0)
    return found


@triton.jit
def _least_kept(
    logits_ptr, slots_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, least_ptr, vocabulary, BLOCK: tl.constexpr
):
    """By halving: the highest score that still leaves k tokens, then the one that leaves p of their probability."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperatures_ptr + slot)
    if temperature == 0:
        tl.store(least_ptr + row, float("-inf"))
        return
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    top = float("-inf")
    for start in tl.range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(_scaled(logits_ptr, row, vocabulary, columns, temperature, float("-inf")), axis=0))
    lowest: tl.constexpr = -2139095041  # the rank of minus infinity
    least = tl.full([], lowest, tl.int64)
    highest = _rank(top).to(tl.int64)
    if (top_k > 0) & (top_k < vocabulary):
        low, high = least, highest
        while low < high:
            middle = low + (high - low + 1) // 2
            enough = _mass_above(logits_ptr, row, vocabulary, temperature, top, middle, BLOCK, True) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        least = low
    if top_p < 1:
        wanted = top_p * _mass_above(logits_ptr, row, vocabulary, temperature, top, least, BLOCK, False)
        low, high = least, highest
        while low < high:
            middle = low + (high - low + 1) // 2
            enough = _mass_above(logits_ptr, row, vocabulary, temperature, top, middle, BLOCK, False) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        least = low
    bits = least.to(tl.int32)
    score = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    if min_p > 0:
        score = tl.maximum(score, top + tl.log(min_p))
    tl.store(least_ptr + row, score)


def least_kept(logits_BV: Tensor, slots_B: Tensor, state: SlotState) -> Tensor:
    least_B = torch.empty(len(logits_BV), dtype=torch.float32, device=logits_BV.device)
    _least_kept[(len(logits_BV),)](
        logits_BV,
        slots_B,
        state.temperatures,
        state.top_k,
        state.top_p,
        state.min_p,
        least_B,
        logits_BV.shape[1],
        BLOCK=_VOCABULARY_BLOCK,
        num_warps=8,
    )
    return least_B


def sample_and_advance(
    logits_BV: Tensor, slots_B: Tensor, state: SlotState, seed_state: int, *, filtered: bool
) -> None:
    """One token for every active slot of the batch, and all that follows from it. `seed_state`: see `sampling.seed_state`."""
    rows, vocabulary = logits_BV.shape
    blocks = triton.cdiv(vocabulary, _VOCABULARY_BLOCK)
    least_B = least_kept(logits_BV, slots_B, state) if filtered else state.temperatures
    sums, largest = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits_BV.device)
    where = torch.empty(rows, blocks, dtype=torch.int32, device=logits_BV.device)
    _summarise[(rows, blocks)](
        logits_BV,
        slots_B,
        state.temperatures,
        least_B,
        sums,
        largest,
        where,
        vocabulary,
        blocks,
        BLOCK=_VOCABULARY_BLOCK,
        FILTERED=filtered,
        num_warps=8,
    )
    _pick[(rows,)](
        logits_BV,
        slots_B,
        state.temperatures,
        least_B,
        sums,
        largest,
        where,
        state.ordinals,
        state.samples,
        state.counts,
        state.positions,
        state.tokens,
        state.limits,
        state.active,
        state.eos,
        state.version,
        state.out_tokens,
        state.out_logprobs,
        state.out_versions,
        seed_state,
        vocabulary,
        blocks,
        len(state.eos),
        state.out_tokens.shape[1],
        BLOCK=_VOCABULARY_BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        EOS=max(1, triton.next_power_of_2(max(1, len(state.eos)))),
        FILTERED=filtered,
        num_warps=8,
    )
