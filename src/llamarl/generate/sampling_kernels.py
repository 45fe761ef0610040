"""Triton kernels of sampling, each the twin of a plain function: filters (`sampling.filter_threshold`), and drawing with the
bookkeeping of slots (`sampling.sample_tokens`, `SlotState.advance`). Imported only where a GPU decodes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.generate.slots import SlotState

_VOCABULARY_BLOCK = 4096
_FILTER_BLOCK = 512
_BOUNDS = 8  # bounds tried in one pass over the scores
_NEAR = 2048  # most scores that are searched without reading all others again


@triton.jit
def _mix(x):
    mask = (1 << 63) - 1
    x = x & mask
    x = ((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x14D049BB133111EB) & mask
    return x ^ (x >> 31)


@triton.jit
def _draw(seed_state, ordinal, sample, position):
    """`sampling.uniform_draws`; its first step, mixing the seed, is done on the host."""
    golden: tl.constexpr = 0x1E3779B97F4A7C15
    state = _mix(seed_state + _mix(ordinal + golden))
    state = _mix(state + _mix(sample + golden))
    state = _mix(state + _mix(position + golden))
    return (state >> 10).to(tl.float64) / 9007199254740992.0


@triton.jit
def _scaled(logits_ptr, row, vocabulary, columns, temperature, least):
    """Scores to sample from: divided by the temperature, and minus infinity where a filter rules the token out."""
    score = tl.load(
        logits_ptr + row.to(tl.int64) * vocabulary + columns, mask=columns < vocabulary, other=float("-inf")
    )
    score = tl.div_rn(score, tl.where(temperature == 0, 1.0, temperature))
    return tl.where(score >= least, score, float("-inf"))


@triton.jit
def _summarize(
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
    """For each block of each row: the largest score, its place, and the sum of exp(score - largest)."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures_ptr + tl.load(slots_ptr + row))
    least = tl.load(least_ptr + row) if FILTERED else float("-inf")
    columns = block * BLOCK + tl.arange(0, BLOCK)
    score = _scaled(logits_ptr, row, vocabulary, columns, temperature, least)
    largest = tl.max(score, axis=0)
    safe = tl.where(largest > float("-inf"), largest, 0.0)
    tl.store(sums_ptr + row * blocks + block, tl.sum(tl.exp(score - safe), axis=0))
    tl.store(largest_ptr + row * blocks + block, largest)
    if temperature == 0:  # only a greedy draw needs the place
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
    """One row: find the block that the draw falls in, the token in it and its log-prob, then advance the slot."""
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
    """Map scores to integers in the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _score_of(rank):
    bits = rank.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weight(score, top, COUNT: tl.constexpr):
    """The weight of a token in the sum that a filter bounds: one, or its probability."""
    return tl.where(score > float("-inf"), 1.0, 0.0) if COUNT else tl.exp(score - top)


@triton.jit
def _sums_above(
    logits_ptr,
    row,
    vocabulary,
    temperature,
    top,
    bounds,
    BLOCK: tl.constexpr,
    BOUNDS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """For every bound: the number of scores at least as high, and the sum of their weights. Added up lane by lane, since a
    reduction in every round would take longer than reading."""
    counts, sums = tl.zeros([BOUNDS, BLOCK], tl.float32), tl.zeros([BOUNDS, BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=4):
        score = _scaled(logits_ptr, row, vocabulary, start + tl.arange(0, BLOCK), temperature, float("-inf"))
        above = score[None, :] >= bounds[:, None]
        counts += tl.where(above, 1.0, 0.0)
        sums += tl.where(above, _weight(score, top, COUNT)[None, :], 0.0)
    return tl.sum(counts, axis=1), tl.sum(sums, axis=1)


@triton.jit
def _collect(kept_ptr, logits_ptr, row, vocabulary, temperature, low, high, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    """Store the scores from `low` to below `high` side by side, at most KEPT of them; returns how many there are."""
    found = 0
    for start in tl.range(0, vocabulary, BLOCK, num_stages=4):
        score = _scaled(logits_ptr, row, vocabulary, start + tl.arange(0, BLOCK), temperature, float("-inf"))
        between = (score >= low) & (score < high)
        place = found + tl.cumsum(between.to(tl.int32), axis=0) - 1
        tl.store(kept_ptr + row * KEPT + place, score, mask=between & (place < KEPT))
        found += tl.sum(between.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads of this program read what was written here
    return found


@triton.jit
def _least_enough(
    kept_ptr,
    logits_ptr,
    row,
    vocabulary,
    temperature,
    top,
    floor,
    wanted,
    BLOCK: tl.constexpr,
    BOUNDS: tl.constexpr,
    KEPT: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The highest score, not below `floor`, such that all scores at least as high weigh `wanted` together.

    Several bounds at a time narrow the range it lies in until few scores are left there; these are searched by bisection.
    """
    index = tl.arange(0, BOUNDS)
    low, high, beyond, steps = floor, float("inf"), 0.0, 0
    left = vocabulary + 0.0
    bounds = tl.maximum(top - 0.25 * tl.exp2(index.to(tl.float32)), floor)
    while (left > KEPT) & (steps < 8):
        counts, sums = _sums_above(logits_ptr, row, vocabulary, temperature, top, bounds, BLOCK, BOUNDS, COUNT)
        enough = (sums >= wanted) & (bounds > low)
        under = (sums < wanted) & (bounds < high)
        many_below = tl.max(tl.where(under, counts, 0.0), axis=0)  # scores above the range
        beyond = tl.maximum(beyond, tl.max(tl.where(under, sums, 0.0), axis=0))
        low = tl.maximum(low, tl.max(tl.where(enough, bounds, float("-inf")), axis=0))
        high = tl.minimum(high, tl.min(tl.where(under, bounds, float("inf")), axis=0))
        many = tl.min(tl.where(enough & (bounds == low), counts, vocabulary + 0.0), axis=0)
        left = tl.minimum(left, many - many_below)
        lowest = tl.maximum(low, top - 128.0)
        bounds = lowest + (tl.minimum(high, top) - lowest) * (index.to(tl.float32) + 1.0) / (BOUNDS + 1.0)
        steps += 1
    first, last = _rank(low).to(tl.int64), _rank(tl.minimum(high, top)).to(tl.int64)
    found = _collect(kept_ptr, logits_ptr, row, vocabulary, temperature, low, high, BLOCK, KEPT)
    if found <= KEPT:
        near = tl.load(kept_ptr + row * KEPT + tl.arange(0, KEPT), mask=tl.arange(0, KEPT) < found, other=float("-inf"))
        weights = tl.where(tl.arange(0, KEPT) < found, _weight(near, top, COUNT), 0.0)
        ranks = _rank(near)
        while first < last:
            middle = first + (last - first + 1) // 2
            enough_here = beyond + tl.sum(tl.where(ranks >= middle, weights, 0.0), axis=0) >= wanted
            first = tl.where(enough_here, middle, first)
            last = tl.where(enough_here, last, middle - 1)
    else:  # too many scores are nearly equal
        while first < last:
            middle = first + (last - first + 1) // 2
            bound = tl.full([1], 0.0, tl.float32) + _score_of(middle)
            _, sums = _sums_above(logits_ptr, row, vocabulary, temperature, top, bound, BLOCK, 1, COUNT)
            enough_here = tl.sum(sums, axis=0) >= wanted
            first = tl.where(enough_here, middle, first)
            last = tl.where(enough_here, last, middle - 1)
    return _score_of(first)


@triton.jit
def _least_kept(
    logits_ptr,
    slots_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    least_ptr,
    kept_ptr,
    vocabulary,
    BLOCK: tl.constexpr,
    BOUNDS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The least score that each row keeps after top-k, then top-p, then min-p."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperatures_ptr + slot)
    if temperature == 0:
        tl.store(least_ptr + row, float("-inf"))
        return
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=4):
        columns = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, _scaled(logits_ptr, row, vocabulary, columns, temperature, float("-inf")))
    top = tl.max(highest, axis=0)
    least = float("-inf")
    # fmt: off
    if (top_k > 0) & (top_k < vocabulary):
        least = _least_enough(kept_ptr, logits_ptr, row, vocabulary, temperature, top, least, top_k.to(tl.float32),
                              BLOCK, BOUNDS, KEPT, True)
    if top_p < 1:
        everything = tl.full([1], 0.0, tl.float32) + least
        _, sums = _sums_above(logits_ptr, row, vocabulary, temperature, top, everything, BLOCK, 1, False)
        wanted = top_p * tl.sum(sums, axis=0)
        least = _least_enough(kept_ptr, logits_ptr, row, vocabulary, temperature, top, least, wanted,
                              BLOCK, BOUNDS, KEPT, False)
    # fmt: on
    if min_p > 0:
        least = tl.maximum(least, top + tl.log(min_p))
    tl.store(least_ptr + row, least)


def filter_threshold(logits_BV: Tensor, slots_B: Tensor, state: SlotState) -> Tensor:
    """The smallest scaled score of each row that may still be drawn."""
    least_B = torch.empty(len(logits_BV), dtype=torch.float32, device=logits_BV.device)
    kept_BN = torch.empty(len(logits_BV), _NEAR, dtype=torch.float32, device=logits_BV.device)
    _least_kept[(len(logits_BV),)](
        logits_BV,
        slots_B,
        state.sampling["temperature"],
        state.sampling["top_k"],
        state.sampling["top_p"],
        state.sampling["min_p"],
        least_B,
        kept_BN,
        logits_BV.shape[1],
        BLOCK=_FILTER_BLOCK,
        BOUNDS=_BOUNDS,
        KEPT=_NEAR,
        num_warps=4,
    )
    return least_B


def sample_and_advance(
    logits_BV: Tensor, slots_B: Tensor, state: SlotState, seed_state: int, *, filtered: bool
) -> None:
    """Draw one token for every active slot of the batch, and advance the slot. `seed_state`: see `sampling.seed_state`."""
    rows, vocabulary = logits_BV.shape
    blocks = triton.cdiv(vocabulary, _VOCABULARY_BLOCK)
    temperatures = state.sampling["temperature"]
    least_B = filter_threshold(logits_BV, slots_B, state) if filtered else temperatures
    sums, largest = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits_BV.device)
    where = torch.empty(rows, blocks, dtype=torch.int32, device=logits_BV.device)
    _summarize[(rows, blocks)](
        logits_BV,
        slots_B,
        temperatures,
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
        temperatures,
        least_B,
        sums,
        largest,
        where,
        state.ordinals,
        state.samples,
        state.counts,
        state.positions,
        state.tokens,
        state.sampling["max_new_tokens"],
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
