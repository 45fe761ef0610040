"""Triton versions of the operations of `experts.py` and `expert_products.py`, for inference. Imported only on a GPU.

Five launches for each layer, two more with adapters, and no shape depends on who was chosen. A tile of a product belongs to
one expert; each program finds its expert from the numbers of rows, so nothing is padded in memory. Every expert's weights are
read once for each tile of its rows, and those of experts without rows not at all. Pairs of a token and an expert of another
rank are in no tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from llamarl.model.expert_products import AdapterPair, ExpertAdapters

_SORT_BLOCK = 1024
_COMBINE_BLOCK = 1024


@triton.jit
def _route(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    experts,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    row, expert, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, PADDED_K)
    inside = expert < experts
    logits = tl.load(logits_ptr + row * experts + expert, mask=inside, other=float("-inf"))
    largest = tl.max(logits, axis=0)
    left = logits
    ids, values = tl.zeros([PADDED_K], tl.int32), tl.full([PADDED_K], float("-inf"), tl.float32)
    for k in tl.static_range(K):
        best = tl.max(left, axis=0)
        chosen = tl.min(tl.where((left == best) & inside, expert, BLOCK), axis=0)  # among equals, the lower id
        ids = tl.where(place == k, chosen, ids)
        values = tl.where(place == k, best, values)
        left = tl.where(expert == chosen, float("-inf"), left)
    shares = tl.exp(values - largest)
    total = tl.sum(shares, axis=0) if NORMALIZE else tl.sum(tl.exp(logits - largest), axis=0)
    kept = place < K
    tl.store(ids_ptr + row * K + place, ids.to(tl.int64), mask=kept)
    tl.store(weights_ptr + row * K + place, shares / total, mask=kept)


def route(logits_TE: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`experts.choose` and `experts.route_weights`."""
    tokens, experts = logits_TE.shape
    ids = torch.empty(tokens, k, dtype=torch.int64, device=logits_TE.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits_TE.device)
    _route[(tokens,)](
        logits_TE.contiguous(),
        ids,
        weights,
        experts,
        K=k,
        PADDED_K=triton.next_power_of_2(k),
        BLOCK=triton.next_power_of_2(experts),
        NORMALIZE=normalize,
        num_warps=1,
    )
    return ids, weights


@triton.jit
def _sort(ids_ptr, order_ptr, ends_ptr, pairs, BLOCK: tl.constexpr):
    """One program for each expert: it counts the pairs of experts before it, then writes its own in their order."""
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + start + at, mask=start + at < pairs, other=1 << 30).to(tl.int32)
        before += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(ends_ptr + expert, place + tl.sum(own, axis=0))
    for start in range(0, pairs, BLOCK):
        mine = tl.load(ids_ptr + start + at, mask=start + at < pairs, other=1 << 30).to(tl.int32) == expert
        count = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order_ptr + place + count - 1, start + at, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)


def sort_pairs(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The pair at each place, sorted by expert, and the number of pairs of experts up to each one."""
    pairs = ids_TK.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids_TK.device)
    ends = torch.empty(experts, dtype=torch.int32, device=ids_TK.device)
    block = min(_SORT_BLOCK, triton.next_power_of_2(pairs))
    _sort[(experts,)](ids_TK, order, ends, pairs, BLOCK=block, num_warps=4)
    return order, ends


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    order_ptr,
    ends_ptr,
    out_ptr,
    scales_ptr,
    inner_ptr,
    b_ptr,
    size,
    outputs,
    experts,
    k,
    rank,
    factor,
    GATHERED: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    SCALED: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A tile of one expert's rows, times `factor`. GATHERED: rows of x are tokens, gathered by pair; otherwise they are
    sorted. SORTED: results are written in sorted order; otherwise by pair. GATED: the result is silu(gate) * up. SCALED:
    weights are quantized, with a scale for each output; the type of x represents their values exactly. RANK: the product of
    an adapter's B with sorted rows of `inner` is added, of which so many are read, a power of 2; 0: no adapter."""
    tile = tl.program_id(1)
    number = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + number, mask=number < experts, other=0)
    starts = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < experts), other=0)
    counts = tl.where(number < experts, ends - starts, 0)
    tiles = (counts + ROWS - 1) // ROWS
    up_to = tl.cumsum(tiles, axis=0)
    if tile >= tl.sum(tiles, axis=0):
        return
    expert = tl.sum((up_to <= tile).to(tl.int32), axis=0)
    is_mine = number == expert
    first = (tile - tl.sum(tl.where(number < expert, tiles, 0), axis=0)) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < tl.sum(tl.where(is_mine, counts, 0), axis=0)
    place = tl.sum(tl.where(is_mine, starts, 0), axis=0) + row
    pair = tl.load(order_ptr + place, mask=inside, other=0)
    source = (pair // k if GATHERED else place).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_column = column < outputs
    deep = tl.arange(0, DEPTH)
    rows_of_expert = 2 * outputs if GATED else outputs
    weight_at = weight_ptr + expert.to(tl.int64) * rows_of_expert * size + column[None, :].to(tl.int64) * size
    x_at = x_ptr + source[:, None] * size
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, size, DEPTH):
        at = start + deep
        x = tl.load(x_at + at[None, :], mask=inside[:, None] & (at < size)[None, :], other=0.0)
        mask = has_column[None, :] & (at < size)[:, None]
        weight = tl.load(weight_at + at[:, None], mask=mask, other=0.0)
        if SCALED:
            weight = weight.to(x.dtype)
        total += tl.dot(x, weight, input_precision="ieee")
        if GATED:
            up = tl.load(weight_at + outputs * size + at[:, None], mask=mask, other=0.0)
            if SCALED:
                up = up.to(x.dtype)
            second += tl.dot(x, up, input_precision="ieee")
    if SCALED:
        scale_at = scales_ptr + expert.to(tl.int64) * rows_of_expert + column
        total *= tl.load(scale_at, mask=has_column, other=0.0)[None, :]
        if GATED:
            second *= tl.load(scale_at + outputs, mask=has_column, other=0.0)[None, :]
    dtype = out_ptr.dtype.element_ty
    if RANK:  # products are rounded before they are added, as they are elsewhere
        deep_rank = tl.arange(0, RANK)
        inner_at = inner_ptr + place[:, None].to(tl.int64) * rank + deep_rank[None, :]
        inner = tl.load(inner_at, mask=inside[:, None] & (deep_rank < rank)[None, :], other=0.0)
        b_at = b_ptr + (expert.to(tl.int64) * rows_of_expert + column[None, :]) * rank + deep_rank[:, None]
        mask = has_column[None, :] & (deep_rank < rank)[:, None]
        added = tl.dot(inner, tl.load(b_at, mask=mask, other=0.0), input_precision="ieee")
        total = total.to(dtype).to(tl.float32) + added.to(dtype).to(tl.float32)
        if GATED:
            added = tl.dot(inner, tl.load(b_at + outputs * rank, mask=mask, other=0.0), input_precision="ieee")
            second = second.to(dtype).to(tl.float32) + added.to(dtype).to(tl.float32)
    if GATED:  # both are rounded first
        gate, up_value = total.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        total = gate * tl.sigmoid(gate) * up_value
    else:
        total = total.to(dtype).to(tl.float32) * factor
    target = place if SORTED else pair
    out_at = out_ptr + target[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(out_at, total.to(dtype), mask=inside[:, None] & has_column[None, :])


@triton.jit
def _combine(y_ptr, weights_ptr, ids_ptr, total_ptr, size, k, experts, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    out = tl.zeros([BLOCK], tl.float32)
    for one in range(k):
        weight = tl.load(weights_ptr + token * k + one)
        written = tl.where(tl.load(ids_ptr + token * k + one) < experts, size, 0)  # not what other ranks hold
        y = tl.load(y_ptr + (token * k + one) * size + column, mask=column < written, other=0.0)
        out += weight * y.to(tl.float32)
    at = total_ptr + token * size + column
    tl.store(at, tl.load(at, mask=inside, other=0.0) + out, mask=inside)


def add_experts(
    total_TC: Tensor,
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    adapters: ExpertAdapters | None = None,
) -> None:
    """Adds `expert_products.expert_mlp` to the fp32 total, in place; the activation is silu. Ids may be the number of
    experts, for those of other ranks."""
    of_gate_up, of_down = scales or (None, None)
    to_gate_up, to_down, factor = adapters or (None, None, 1.0)
    (tokens, k), (experts, _, inner, hidden) = ids_TK.shape, gate_up_E2IC.shape
    pairs = tokens * k
    order, ends = sort_pairs(ids_TK, experts)
    x_TC = x_TC.contiguous()
    inner_PI, out_PC = x_TC.new_empty(pairs, inner), x_TC.new_empty(pairs, hidden)
    beside = _beside(x_TC, to_gate_up, order, ends, factor, k, gathered=True)
    _launch(x_TC, gate_up_E2IC, order, ends, inner_PI, of_gate_up, k, beside, gathered=True, gated=True, is_sorted=True)
    beside = _beside(inner_PI, to_down, order, ends, factor, k)
    _launch(inner_PI, down_ECI, order, ends, out_PC, of_down, k, beside)
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        out_PC, weights_TK, ids_TK, total_TC, hidden, k, experts, BLOCK=block, num_warps=4
    )


def _beside(
    x: Tensor, pair: AdapterPair | None, order: Tensor, ends: Tensor, factor: float, k: int, *, gathered: bool = False
) -> tuple[Tensor, Tensor] | None:
    """A's product of sorted rows, times the factor, and B."""
    if pair is None:
        return None
    inner_PR = x.new_empty(len(order), pair.a_ERC.shape[1])
    _launch(x, pair.a_ERC, order, ends, inner_PR, None, k, factor=factor, gathered=gathered, is_sorted=True)
    return inner_PR, pair.b_ENR


def _launch(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    ends: Tensor,
    out: Tensor,
    scales: Tensor | None,
    k: int,
    beside: tuple[Tensor, Tensor] | None = None,
    *,
    factor: float = 1.0,
    gathered: bool = False,
    gated: bool = False,
    is_sorted: bool = False,
) -> None:
    inner, b = beside or (ends, ends)
    rank = inner.shape[1] if beside else 0
    pairs, experts, size, outputs = len(order), len(weight), x.shape[1], out.shape[1]
    rows = min(128, max(16, triton.next_power_of_2(triton.cdiv(pairs, experts))))
    columns = min(64, max(16, triton.next_power_of_2(outputs)))
    depth = min(128 if rows <= 64 else 64, max(16, triton.next_power_of_2(size)))
    tiles = min(pairs, triton.cdiv(pairs, rows) + experts)
    # Tiles of one expert run at the same time as its other columns, so that its rows stay in the cache.
    _product[(triton.cdiv(outputs, columns), tiles)](
        x,
        weight,
        order,
        ends,
        out,
        ends if scales is None else scales,
        inner,
        b,
        size,
        outputs,
        experts,
        k,
        rank,
        factor,
        GATHERED=gathered,
        GATED=gated,
        SORTED=is_sorted,
        SCALED=scales is not None,
        RANK=max(16, triton.next_power_of_2(rank)) if rank else 0,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        EXPERTS=triton.next_power_of_2(experts),
        num_warps=4 if rows <= 64 else 8,
        num_stages=3,
    )
