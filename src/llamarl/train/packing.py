"""Documents of all lengths packed to a token budget, balanced over ranks and passes by tokens.

A pack is what one forward and backward pass takes: rows that hold documents one behind the other. On a GPU it is one long
row, since attention there skips what lies outside a document; elsewhere rows are as short as the longest document allows,
since masked attention computes whole rows. The only padding is at the tail of a row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarl.algo.batch import Document, TokenBatch

_SHORTEST_ROW = 64  # below this, more rows cost more than the masked part of a row does
_TAIL = 128  # a GPU's long row is filled up to a multiple of this, so that its products have whole tiles
PADDING = -1


@dataclass(frozen=True)
class Pack:
    """R rows of T tokens, and beside them the N answer tokens as flat vectors."""

    tokens_RT: Tensor
    positions_RT: Tensor  # of each token in its document
    documents_RT: Tensor  # which document of the pack it belongs to; PADDING at the tail of a row
    lengths: tuple[int, ...]  # of the documents, in the order in which they lie
    at_N: Tensor  # where (in R*T) the hidden state lies that predicts each answer token ...
    targets_N: Tensor  # ... and the token it should predict
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor  # which document of the update
    staleness_N: Tensor
    fresh_N: Tensor  # whether all of its document was sampled by the version being trained
    columns: dict[str, Tensor]
    counts: bool = True  # False: it only keeps its rank in step with the others, and nothing is learned from it

    @property
    def num_targets(self) -> int:
        return len(self.targets_N)

    def to(self, device: torch.device) -> Pack:
        if device.type == "cpu":
            return self
        moved = {name: _move(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        columns = {name: _move(value, device) for name, value in self.columns.items()}
        return Pack(**moved, lengths=self.lengths, columns=columns, counts=self.counts)

    def tokens(
        self, part: slice, policy_logprobs_n: Tensor, entropy_n: Tensor, *, num_tokens: int, num_sequences: int
    ) -> TokenBatch:
        """What the loss sees of `part` of the answer tokens."""
        return TokenBatch(
            policy_logprobs_N=policy_logprobs_n,
            behavior_logprobs_N=self.behavior_logprobs_N[part],
            advantages_N=self.advantages_N[part],
            sequence_N=self.sequence_N[part],
            entropy_N=entropy_n,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            columns={name: value[part] for name, value in self.columns.items()},
        )


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """From pinned memory, so that the next pack travels while this one is computed."""
    return tensor.pin_memory().to(device, non_blocking=True)


def balance(lengths: Sequence[int], limit: int, multiple: int = 1) -> list[list[int]]:
    """Deal items into as few bins as hold at most `limit` each (one that is longer lies alone), filled as evenly as can
    be; the number of bins is a multiple of `multiple`, with empty ones if need be. Longest first, each to the emptiest."""
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    count = -(-max(1, -(-sum(lengths) // limit)) // multiple) * multiple
    while (bins := _deal(order, lengths, limit, count)) is None:
        count += multiple
    return bins


def _deal(order: Sequence[int], lengths: Sequence[int], limit: int, count: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    fill = [(0, number) for number in range(count)]
    for item in order:
        used, number = fill[0]
        if used and used + lengths[item] > limit:
            return None  # not even the emptiest has room
        bins[number].append(item)
        heapq.heapreplace(fill, (used + lengths[item], number))
    return [sorted(items) for items in bins]


def make_packs(
    documents: Sequence[Document], budget: int, *, rank: int = 0, num_ranks: int = 1, long_rows: bool
) -> list[Pack]:
    """This rank's share of an update that has at least one document. Every rank gets equally many packs, since ranks
    meet in every pass; where there are too few documents, a copy of the first one goes along and counts for nothing."""
    bins = balance([len(document.tokens) for document in documents], budget, num_ranks)
    return [_pack(documents, items, long_rows=long_rows) for items in bins[rank::num_ranks]]


def _pack(documents: Sequence[Document], items: Sequence[int], *, long_rows: bool) -> Pack:
    counts, items = bool(items), items or [0]
    lengths = [len(documents[item].tokens) for item in items]
    if long_rows:
        rows = [list(items)]
        width = -(-sum(lengths) // _TAIL) * _TAIL
    else:
        width = max([_SHORTEST_ROW, *lengths])
        rows = [[items[index] for index in row] for row in balance(lengths, width)]
        width = max(sum(len(documents[item].tokens) for item in row) for row in rows)
    return _to_tensors(documents, rows, width, counts)


def _to_tensors(documents: Sequence[Document], rows: Sequence[Sequence[int]], width: int, counts: bool) -> Pack:
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(tokens)
    numbers = np.full_like(tokens, PADDING)
    order = [item for row in rows for item in row]
    starts: list[int] = []  # where each document begins, in rows * width
    for row, items in enumerate(rows):
        column = 0
        for item in items:
            document = documents[item]
            end = column + len(document.tokens)
            tokens[row, column:end] = document.tokens
            positions[row, column:end] = np.arange(end - column)
            numbers[row, column:end] = len(starts)
            starts.append(row * width + column)
            column = end
        positions[row, column:] = np.arange(width - column)
    packed = [documents[item] for item in order]
    sizes = np.array([document.num_answer_tokens for document in packed])
    before = [start + document.places - 1 for start, document in zip(starts, packed, strict=True)]
    fresh = np.array([not document.staleness.any() for document in packed], dtype=bool)
    return Pack(
        tokens_RT=torch.from_numpy(tokens),
        positions_RT=torch.from_numpy(positions),
        documents_RT=torch.from_numpy(numbers),
        lengths=tuple(len(document.tokens) for document in packed),
        at_N=torch.from_numpy(_concatenate(before, np.int64)),
        targets_N=torch.from_numpy(_concatenate([document.answer for document in packed], np.int64)),
        behavior_logprobs_N=_floats([document.behavior_logprobs for document in packed]),
        advantages_N=_floats([document.advantages for document in packed]),
        sequence_N=torch.from_numpy(np.repeat(np.array(order, dtype=np.int64), sizes)),
        staleness_N=torch.from_numpy(_concatenate([document.staleness for document in packed], np.int64)),
        fresh_N=torch.from_numpy(np.repeat(fresh, sizes)),
        columns={name: _floats([document.columns[name] for document in packed]) for name in _columns(packed)},
        counts=counts,
    )


def _columns(documents: Sequence[Document]) -> list[str]:
    """Columns that every document of the pack has; a role adds its own to all or none."""
    return sorted(set.intersection(*(set(document.columns) for document in documents))) if documents else []


def _floats(parts: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(_concatenate(parts, np.float32))


def _concatenate(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype)
