"""Packs documents of all lengths to a token budget, balanced over ranks and passes by tokens.

A pack is the input of one forward and backward pass: rows of documents one behind the other. On a GPU it is one long row,
since attention there skips everything outside a document. Elsewhere rows are as short as the longest document allows, since
masked attention computes whole rows. The only padding is at the tail of a row.
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

_SHORTEST_ROW = 64  # tokens; in shorter rows, the number of rows costs more than masked attention saves
TILE = 128  # tokens; a GPU's long row is padded to a multiple of this, so that its products have whole tiles
PADDING = -1


@dataclass(frozen=True)
class Pack:
    """R rows of T tokens, and their N answer tokens as flat vectors."""

    tokens_RT: Tensor
    positions_RT: Tensor  # position of each token in its document
    documents_RT: Tensor  # document of the pack that each token belongs to; PADDING at the tail of a row
    lengths: tuple[int, ...]  # lengths of the documents, in their order
    at_N: Tensor  # index (in R*T) of the hidden state that predicts each answer token
    targets_N: Tensor  # answer tokens
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor  # document of the update that each answer token belongs to
    staleness_N: Tensor
    fresh_N: Tensor  # whether the version being trained sampled the whole document
    columns: dict[str, Tensor]
    counts: bool = True  # False: a filler that keeps its rank in step with the others; nothing is learned from it

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
        """Input of the loss for `part` of the answer tokens."""
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
    """Copies from pinned memory, so that the next pack is copied while this one is computed."""
    return tensor.pin_memory().to(device, non_blocking=True)


def balance(lengths: Sequence[int], limit: int, multiple: int = 1) -> list[list[int]]:
    """Deals items into as few bins as possible of at most `limit` each (a longer item is alone), filled as evenly as
    possible. The number of bins is a multiple of `multiple`; some may be empty. Longest first, each to the emptiest bin."""
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
            return None  # it does not even fit the emptiest bin
        bins[number].append(item)
        heapq.heapreplace(fill, (used + lengths[item], number))
    return [sorted(items) for items in bins]


def make_packs(
    documents: Sequence[Document],
    budget: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    long_rows: bool,
    multiple_of: int = TILE,
) -> list[Pack]:
    """This rank's packs of an update, which has at least one document. Every rank gets equally many packs, since every pass
    has collectives. Where documents are too few, a copy of the first one fills in and does not count. Long rows are padded
    to a multiple of `multiple_of`."""
    bins = balance([len(document.tokens) for document in documents], budget, num_ranks)
    multiple = multiple_of if long_rows else 0
    return [_pack(documents, items, multiple) for items in bins[rank::num_ranks]]


def _pack(documents: Sequence[Document], items: Sequence[int], multiple: int) -> Pack:
    counts, items = bool(items), items or [0]
    lengths = [len(documents[item].tokens) for item in items]
    if multiple:
        rows = [list(items)]
        width = -(-sum(lengths) // multiple) * multiple
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
    starts: list[int] = []  # index of each document's first token, in rows * width
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
    """Names of the columns of the pack's documents; a role adds its columns to all of them or to none."""
    return sorted(set.intersection(*(set(document.columns) for document in documents))) if documents else []


def _floats(parts: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(_concatenate(parts, np.float32))


def _concatenate(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype)
