"""Attention over trees in one long row, in parts: every node to itself, and to each node before it in its documents.

Nodes lie level by level: all prompts, then all their answers. So a part has its queries in one slice of the row and its keys
in another one, and is a single call of PyTorch's variable-length FlashAttention: the answers to a prompt are one long query.

Parts are joined by the logarithms of their sums, as FlashAttention joins its blocks. The backward pass of a part is given the
joined output and the joined sums. Then its weights are those of the whole softmax, and its gradients are exact.

Layers with a window see little of what comes before a node. There, each node has a copy of the keys and values that its first
tokens see, in front of its own, and all nodes are documents of one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions
from llamarl.train.flash import causal_flash, flash_backward, flash_forward, longest_of, row_major, starts_of
from llamarl.train.fp16 import to_half
from llamarl.train.packing import NO_PARENT, Node, Pack

_LONGEST_BRANCHES = 4096  # tokens; longest run of all documents behind a node together, which are few and long


class WindowedNodes:
    """Which keys each node of a row needs where tokens see the latest `window` only: its own, and those before it that its
    first token sees."""

    def __init__(self, pack: Pack, window: int, device: torch.device) -> None:
        places, lengths = list[Tensor](), list[int]()
        for node in pack.nodes:
            runs = list(_runs_before(pack, node, window))
            places += [torch.arange(first, first + count) for first, count in runs]
            lengths.append(sum(count for _, count in runs))
        used = sum(pack.lengths)
        tail = pack.tokens_RT.numel() - used
        self.keys_at = torch.cat([*places, torch.arange(used, used + tail)]).to(device, non_blocking=True)
        torch._dynamo.maybe_mark_dynamic(self.keys_at, 0)
        self.starts = starts_of([*lengths, tail], device)
        self.longest = longest_of([*lengths, tail])


def _runs_before(pack: Pack, node: Node, window: int) -> Iterator[tuple[int, int]]:
    """Runs of tokens, as first index and length: those that a node sees before it, in order, and its own."""
    if node.parent != NO_PARENT:
        yield from _last_of(pack, pack.nodes[node.parent], node.start - window + 1)
    yield node.first, node.length


def _last_of(pack: Pack, node: Node, lowest: int) -> Iterator[tuple[int, int]]:
    """Runs of a node and those before it, from position `lowest` on."""
    if node.end <= lowest:
        return
    if node.parent != NO_PARENT:
        yield from _last_of(pack, pack.nodes[node.parent], lowest)
    skipped = max(0, lowest - node.start)
    yield node.first + skipped, node.length - skipped


class FlashTrees:
    """Attention over one long row of trees. `window`: that of the layers that have one; 0: none has."""

    def __init__(self, pack: Pack, window: int = 0) -> None:
        self.nodes = WindowedNodes(pack, window, pack.tokens_RT.device) if window else None
        self.window = window
        self.device = pack.tokens_RT.device
        lengths = [*pack.lengths, pack.tokens_RT.numel() - sum(pack.lengths)]  # the tail is a node that is ignored
        self.starts_D, self.longest = starts_of(lengths, self.device), longest_of(lengths)
        members = _by_level(pack)
        self.levels = [self._extent(sum(pack.lengths[node] for node in level)) for level in members]
        self.pairs = tuple((above, below) for below in range(1, len(members)) for above in range(below))
        self.starts: list[Tensor] = []
        self.longests: tuple[int, ...] = ()
        for above, below in self.pairs:
            self._add_part(pack, members[above], members[below])

    def _extent(self, size: int) -> Tensor:
        """An empty tensor with this many rows: in compiled code, sizes of tensors are variables and numbers are constants."""
        extent = torch.empty(size, 0, device=self.device)
        torch._dynamo.maybe_mark_dynamic(extent, 0)
        return extent

    def _add_part(self, pack: Pack, above: Sequence[int], below: Sequence[int]) -> None:
        """Attention from nodes of a level to those before them on a level above."""
        behind = dict.fromkeys(above, 0)
        for node in below:
            ancestor = node
            while ancestor not in behind:
                ancestor = pack.nodes[ancestor].parent
            behind[ancestor] += pack.lengths[node]
        queries, keys = list(behind.values()), [pack.lengths[node] for node in above]
        self.starts += [starts_of(queries, self.device), starts_of(keys, self.device)]
        self.longests += (longest_of(queries, _LONGEST_BRANCHES), longest_of(keys))

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        if options.window:
            assert self.nodes is not None and options.window <= self.window
            keys, values = (x[0].index_select(0, self.nodes.keys_at) for x in (k_RTKD, v_RTKD))
            ends = self.starts_D, self.nodes.starts, self.longest, self.nodes.longest
            return causal_flash(q_RTHD[0], keys, values, *ends, options)[None]
        out_THD: Tensor = TreeFlash.apply(  # type: ignore[no-untyped-call]
            q_RTHD[0],
            k_RTKD[0],
            v_RTKD[0],
            self.longest,
            self.longests,
            self.pairs,
            options.scale,
            self.starts_D,
            *self.levels,
            *self.starts,
        )
        return out_THD[None]


def _by_level(pack: Pack) -> list[list[int]]:
    """Nodes of each level; roots without children belong to none."""
    parents = {node.parent for node in pack.nodes} - {NO_PARENT}
    found: list[list[int]] = [[] for _ in range(max(pack.levels) + 1)]
    for number, level in enumerate(pack.levels):
        if level or number in parents:
            found[level].append(number)
    return found


class TreeFlash(torch.autograd.Function):
    """Attention in parts. `pairs`: for each part the level of its keys and that of its queries; `longests`: for each part the
    longest run of queries and of keys. `where`: starts of all nodes, extents of all levels, starts of each part's runs of
    queries and of keys. fp32 operands mean an fp16 forward and a bf16 backward pass (`fp16.py`)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        longest: int,
        longests: tuple[int, ...],
        pairs: tuple[tuple[int, int], ...],
        scale: float | None,
        *where: Tensor,
    ) -> Tensor:
        wide = q_THD.dtype == torch.float32
        q, k, v = (to_half(x) if wide else x for x in (q_THD, k_TKD, v_TKD))
        starts_D, levels, starts = _unfold(where, len(pairs))
        out, sums, random, unused = flash_forward(q, k, v, starts_D, starts_D, longest, longest, True, scale)
        outs, sums_of = _slices(out, levels), _slices(sums.t(), levels)
        qs, ks, vs = (_slices(x, levels) for x in (q, k, v))
        for part, (above, below) in enumerate(pairs):
            ends = starts[2 * part], starts[2 * part + 1], longests[2 * part], longests[2 * part + 1]
            other, others, *_ = flash_forward(qs[below], ks[above], vs[above], *ends, False, scale)
            outs[below], sums_of[below] = join(outs[below], sums_of[below], other, others.t())
        out, sums = torch.cat(outs), row_major(torch.cat(sums_of).t())
        ctx.save_for_backward(q, k, v, out, sums, random, unused, *where)
        ctx.longest, ctx.longests, ctx.pairs, ctx.wide, ctx.scale = longest, longests, pairs, wide, scale
        return out.float() if wide else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, random, unused, *where = ctx.saved_tensors
        starts_D, levels, starts = _unfold(where, len(ctx.pairs))
        grad = grads[0]
        if ctx.wide:
            grad, q, k, v, out = (x.to(torch.bfloat16) for x in (grad, q, k, v, out))
        whole = flash_backward(
            (grad, q, k, v, out, sums), starts_D, starts_D, ctx.longest, ctx.longest, True, random, unused, ctx.scale
        )
        of_q, of_k, of_v = (_slices(x, levels) for x in whole)
        tops, qs, ks, vs, outs, sums_of = (_slices(x, levels) for x in (grad, q, k, v, out, sums.t()))
        for part, (above, below) in enumerate(ctx.pairs):
            ends = starts[2 * part], starts[2 * part + 1], ctx.longests[2 * part], ctx.longests[2 * part + 1]
            given = tops[below], qs[below], ks[above], vs[above], outs[below], row_major(sums_of[below].t())
            more_q, more_k, more_v = flash_backward(given, *ends, False, random, unused, ctx.scale)
            of_q[below] = of_q[below] + more_q
            of_k[above], of_v[above] = of_k[above] + more_k, of_v[above] + more_v
        found = [torch.cat(parts) for parts in (of_q, of_k, of_v)]
        found = [x.float() for x in found] if ctx.wide else found
        return *found, None, None, None, None, *(None for _ in where)


def _unfold(where: Sequence[Tensor], parts: int) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    levels = len(where) - 1 - 2 * parts
    return where[0], where[1 : 1 + levels], where[1 + levels :]


def _slices(x: Tensor, levels: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each level, and those behind all levels."""
    edges = [0, *accumulate(level.shape[0] for level in levels)]
    return [*(x[start:end] for start, end in pairwise(edges)), x[edges[-1] :]]


def join(out_QHD: Tensor, sums_QH: Tensor, other_QHD: Tensor, others_QH: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the attention of the same queries to two sets of keys; `sums` are logarithms of the sums of the softmax."""
    joined_QH = torch.logaddexp(sums_QH, others_QH)
    weight_QHD = (others_QH - joined_QH).exp()[..., None].expand(out_QHD.shape)
    out = torch.lerp(out_QHD.to(weight_QHD.dtype), other_QHD.to(weight_QHD.dtype), weight_QHD)
    return out.to(out_QHD.dtype), joined_QH
