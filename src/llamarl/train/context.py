"""Context parallelism: ranks share the tokens of a pack, for sequences whose activations one rank cannot hold.

The pack's row is cut into chunks of one length, two for each rank, so all ranks have equally many tokens. Late tokens of long
documents have more to attend to, so the heaviest chunks are dealt out first, each rank's second chunk being as light as its
first one is heavy: with a single document, the first and the last chunk go to the same rank. Everything but attention is
computed token by token, so a share is a pack like any other; attention gathers keys and values (`context_attention.py`).

A rank predicts the answer tokens whose states it has. Losses of single tokens need nothing else. A loss of whole answers is
computed by every rank from the log-probs of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarl.train.mesh import TrainerMesh
from llamarl.train.packing import NO_PARENT, PADDING, Node, Pack

CHUNKS = 2  # of each rank

Indices = NDArray[np.int64]


class TokenRun(NamedTuple):
    """Tokens [first, end) of a share, which lie behind one another in one node of the whole pack, or in padding."""

    node: int
    first: int
    end: int


@dataclass(frozen=True)
class ContextShare:
    """How a pack is shared by ranks, and what this rank has of it."""

    whole: Pack
    rows: tuple[Indices, ...]  # of each rank: the whole row's indices of its tokens, in its order
    rank: int
    runs: tuple[TokenRun, ...]  # all of this rank's tokens
    answers: Indices  # which of the whole pack's answer tokens are this share's, in its order

    @cached_property
    def gathered(self) -> Indices:
        """The whole row's indices of all tokens, rank by rank: the order in which they are gathered."""
        return np.concatenate(self.rows)

    def positions(self, run: TokenRun) -> tuple[int, int]:
        """Positions of a run's tokens in their documents."""
        node, row = self.whole.nodes[run.node], self.rows[self.rank]
        start = node.start + int(row[run.first]) - node.first
        return start, start + run.end - run.first


def take_share(pack: Pack, ranks: int, rank: int) -> Pack:
    """One rank's share of a pack of one row, whose width is a multiple of `CHUNKS * ranks`."""
    number_T, position_T = _row_of(pack)
    rows = _deal_chunks(np.where(number_T == PADDING, 0, position_T + 1), ranks)
    mine = rows[rank]
    place_T = np.full(len(number_T), -1)
    place_T[mine] = np.arange(len(mine))
    answers = np.flatnonzero(place_T[pack.at] >= 0)
    share = ContextShare(pack, rows, rank, _runs(number_T[mine], mine), answers)
    # Every rank has a part in the loss, and metrics of it. A rank without answer tokens predicts one that does not count.
    chosen, counts = (answers, pack.counts) if len(answers) else (np.zeros(1, np.int64), False)
    at, tokens, found = np.maximum(place_T[pack.at[chosen]], 0), torch.from_numpy(mine), torch.from_numpy(chosen)
    return replace(
        pack,
        tokens_RT=pack.tokens_RT[:, tokens],
        positions_RT=pack.positions_RT[:, tokens],
        nodes_RT=pack.nodes_RT[:, tokens],
        routes_RTLK=None if pack.routes_RTLK is None else pack.routes_RTLK[:, tokens],
        nodes=tuple(Node(NO_PARENT, run.first, *share.positions(run)) for run in share.runs if run.node != PADDING),
        at_N=torch.from_numpy(at),
        at=at,
        **{name: getattr(pack, name)[found] for name in _PER_ANSWER_TOKEN},
        columns={name: column[found] for name, column in pack.columns.items()},
        counts=counts,
        share=share,
    )


_PER_ANSWER_TOKEN = (
    "targets_N",
    "behavior_logprobs_N",
    "advantages_N",
    "sequence_N",
    "within_N",
    "staleness_N",
    "fresh_N",
)


def _row_of(pack: Pack) -> tuple[Indices, Indices]:
    """Node and position of each token of the row."""
    assert pack.tokens_RT.shape[0] == 1, "a share is cut from one row"
    number_T, position_T = np.full(pack.tokens_RT.numel(), PADDING), np.zeros(pack.tokens_RT.numel(), np.int64)
    for number, node in enumerate(pack.nodes):
        own = slice(node.first, node.first + node.length)
        number_T[own], position_T[own] = number, np.arange(node.start, node.end)
    return number_T, position_T


def _deal_chunks(seen_T: Indices, ranks: int) -> tuple[Indices, ...]:
    """The row's indices of each rank's tokens. Chunks go to the ranks by the pairs in their attention, heaviest first, there
    and back. `seen_T`: number of tokens that each token attends to."""
    chunks = np.arange(len(seen_T)).reshape(CHUNKS * ranks, -1)
    work = seen_T[chunks].sum(-1).tolist()
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for number, chunk in enumerate(sorted(range(len(work)), key=lambda chunk: (-work[chunk], chunk))):
        turn, place = divmod(number, ranks)
        dealt[ranks - 1 - place if turn % 2 else place].append(chunk)
    return tuple(chunks[sorted(mine)].flatten() for mine in dealt)


def _runs(number_t: Indices, row: Indices) -> tuple[TokenRun, ...]:
    breaks = (np.diff(row) != 1) | (np.diff(number_t) != 0)
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(row)]
    return tuple(TokenRun(int(number_t[first]), first, end) for first, end in pairwise(edges))


def whole_answers(pack: Pack) -> tuple[Pack, float]:
    """The pack with the answer tokens of all ranks that share it, and the share of its loss that this rank counts."""
    if pack.share is None:
        return pack, 1.0
    return pack.share.whole.to(pack.tokens_RT.device), 1.0 / len(pack.share.rows)


def join_answers(values_N: Tensor, pack: Pack, mesh: TrainerMesh) -> Tensor:
    """Values of the answer tokens of all ranks that share the pack (a collective); differentiable, if every rank computes
    its share of the same function of them."""
    if pack.share is None:
        return values_N
    answers_n = torch.from_numpy(pack.share.answers).to(values_N.device)
    joined: Tensor = _Joined.apply(values_N, answers_n, pack.share.whole.num_targets, mesh)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_N: Tensor, answers_n: Tensor, size: int, mesh: TrainerMesh) -> Tensor:
        whole_N = values_N.new_zeros(size)
        whole_N[answers_n] = values_N[
            : len(answers_n)
        ]  # without answers of its own, a rank has one that does not count
        ctx.save_for_backward(answers_n)
        ctx.length, ctx.ranks = len(values_N), mesh.context
        return mesh.sum_over_context(whole_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (answers_n,) = ctx.saved_tensors
        grad_N = grads[0].new_zeros(ctx.length)
        grad_N[: len(answers_n)] = ctx.ranks * grads[0][answers_n]
        return grad_N, None, None, None
