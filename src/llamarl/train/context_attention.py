"""Attention where ranks share the tokens of a pack: each gathers the keys and values of all, and has its own queries.

With grouped heads, keys and values are a small part of a layer's activations. They are gathered again in the backward pass
instead of being kept, and their gradients are summed in fp32 over the ranks.

A run of queries, which lie behind one another in one node, sees its documents' tokens up to its own end. On a GPU these are
put behind one another for each run, and a single call of variable-length FlashAttention, whose causal mask ends where keys
end, attends to them: so a tree needs no parts that are joined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.model.plain_attention import masked_attention
from llamarl.model.transformer import Attend
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions
from llamarl.train.attention import ancestors_of
from llamarl.train.context import ContextShare, Indices
from llamarl.train.flash import flash_backward, flash_forward, longest_of, starts_of
from llamarl.train.fp16 import to_half
from llamarl.train.mesh import TrainerMesh
from llamarl.train.packing import PADDING, Pack, path_of


def context_attention(pack: Pack, mesh: TrainerMesh, *, long_rows: bool) -> Attend:
    """The attention of a rank's share of a pack."""
    assert pack.share is not None
    group = mesh.context_group.group_name
    return (FlashContext if long_rows else MaskedContext)(pack, pack.share, group)


class MaskedContext:
    """Attention with a mask from this rank's tokens to all: it works on any device and is quadratic in the row's length."""

    def __init__(self, pack: Pack, share: ContextShare, group: str) -> None:
        self.group, self.ranks = group, len(share.rows)
        device, seen = pack.tokens_RT.device, ancestors_of(share.whole)
        numbers_T = share.whole.nodes_RT[0].cpu()
        queries, keys = torch.from_numpy(share.rows[share.rank]), torch.from_numpy(share.gathered)
        seen_QK = seen[numbers_T[queries][:, None], numbers_T[keys]] & (keys <= queries[:, None])
        self.mask_QK = seen_QK.to(device)
        positions_T = share.whole.positions_RT[0].cpu()
        self.queries_Q, self.keys_K = (positions_T[one].to(device) for one in (queries, keys))

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        both: Tensor = _Gathered.apply(torch.cat((k_RTKD[0], v_RTKD[0]), 1), self.ranks, self.group)  # type: ignore[no-untyped-call]
        k, v = (x[None] for x in both.chunk(2, dim=1))
        mask_QK = (
            self.mask_QK & (self.keys_K > self.queries_Q[:, None] - options.window) if options.window else self.mask_QK
        )
        return masked_attention(q_RTHD, k, v, mask_QK, options)


class FlashContext:
    """Attention of one long row's share: PyTorch's variable-length FlashAttention."""

    def __init__(self, pack: Pack, share: ContextShare, group: str) -> None:
        self.group, self.ranks = group, len(share.rows)
        device = pack.tokens_RT.device
        queries, keys = [run.end - run.first for run in share.runs], keys_of_runs(share)
        self.keys_S = torch.from_numpy(np.concatenate(keys)).to(device, non_blocking=True)
        torch._dynamo.maybe_mark_dynamic(self.keys_S, 0)
        lengths = [len(one) for one in keys]
        self.starts_q, self.starts_k = starts_of(queries, device), starts_of(lengths, device)
        self.longest_q, self.longest_k = longest_of(queries), longest_of(lengths)

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        out_THD: Tensor = ContextFlash.apply(  # type: ignore[no-untyped-call]
            q_RTHD[0],
            k_RTKD[0],
            v_RTKD[0],
            self.keys_S,
            self.starts_q,
            self.starts_k,
            self.longest_q,
            self.longest_k,
            self.ranks,
            self.group,
            options.scale,
            options.window,
        )
        return out_THD[None]


def keys_of_runs(share: ContextShare) -> list[Indices]:
    """Where the keys of each run of queries are among the gathered ones: its documents' tokens up to its own last one.
    Padding sees itself."""
    place_T = np.empty_like(share.gathered)
    place_T[share.gathered] = np.arange(len(place_T))
    row = share.rows[share.rank]
    seen = [
        row[run.first : run.end]
        if run.node == PADDING
        else path_of(share.whole.nodes, run.node)[: share.positions(run)[1]]
        for run in share.runs
    ]
    return [place_T[one] for one in seen]


class ContextFlash(torch.autograd.Function):
    """Attention to gathered keys and values. fp32 operands mean an fp16 forward and a bf16 backward pass (`fp16.py`)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        keys_S: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        longest_q: int,
        longest_k: int,
        ranks: int,
        group: str,
        scale: float | None,
        window: int,
    ) -> Tensor:
        wide = q_THD.dtype == torch.float32
        q, both = q_THD, torch.cat((k_TKD, v_TKD), 1)
        if wide:
            q, both = to_half(q), to_half(both)
        k, v = gather(both, ranks, group).index_select(0, keys_S).chunk(2, dim=1)
        out, sums, random, unused = flash_forward(
            q, k, v, starts_q, starts_k, longest_q, longest_k, True, scale, window
        )
        ctx.save_for_backward(q, both, out, sums, random, unused, keys_S, starts_q, starts_k)
        ctx.longest_q, ctx.longest_k, ctx.ranks, ctx.group = longest_q, longest_k, ranks, group
        ctx.wide, ctx.scale, ctx.window = wide, scale, window
        return out.float() if wide else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, both, out, sums, random, unused, keys_S, starts_q, starts_k = ctx.saved_tensors
        grad = grads[0]
        if ctx.wide:
            grad, q, both, out = (x.to(torch.bfloat16) for x in (grad, q, both, out))
        whole = gather(both, ctx.ranks, ctx.group)
        k, v = whole.index_select(0, keys_S).chunk(2, dim=1)
        given = grad, q, k, v, out, sums
        longests = ctx.longest_q, ctx.longest_k
        of_q, *of_both = flash_backward(
            given, starts_q, starts_k, *longests, True, random, unused, ctx.scale, ctx.window
        )
        total = torch.zeros(whole.shape, dtype=torch.float32, device=whole.device)
        total = total.index_add(0, keys_S, torch.cat(of_both, 1).float())
        of_k, of_v = scatter_sum(total, ctx.ranks, ctx.group).to(of_q.dtype).chunk(2, dim=1)
        found = [x.float() for x in (of_q, of_k, of_v)] if ctx.wide else [of_q, of_k, of_v]
        return *found, *[None] * 9


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return gather(part, ranks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sum(grads[0].float(), ctx.ranks, ctx.group).to(grads[0].dtype), None, None


def gather(part: Tensor, ranks: int, group: str) -> Tensor:
    """The parts of all ranks behind one another. Compiled code takes it as it is."""
    functional = torch.ops._c10d_functional
    whole: Tensor = functional.wait_tensor(functional.all_gather_into_tensor(part.contiguous(), ranks, group))
    return whole


def scatter_sum(whole: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's part of the sum over all ranks."""
    functional = torch.ops._c10d_functional
    summed = functional.reduce_scatter_tensor(whole.contiguous(), "sum", ranks, group)
    part: Tensor = functional.wait_tensor(summed)
    return part
