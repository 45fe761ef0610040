"""Trees of documents that begin with the same tokens, such as the answers to one prompt: what they share is computed once.

A branch is a run of tokens, and how documents go on behind it. A document is a path from a root: its tokens are those of the
branches on the path. So a document that shares nothing is a tree of one branch, a prompt with its answers is a tree of two
levels, and few-shot examples in front of all prompts make a third one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llamarl.algo.batch import Document
from llamarl.train.balance import balance

LEVELS = 3  # most levels of a tree; attention has a part for each two of them

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class TreeBranch:
    """Tokens [start, end) of a document. All documents that end in or behind it have the same tokens up to `end`."""

    document: int
    start: int
    end: int
    children: tuple[TreeBranch, ...] = ()
    ending: tuple[int, ...] = ()  # documents that end with this branch

    @property
    def length(self) -> int:
        return self.end - self.start

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the whole tree, each counted once."""
        return self.length + sum(child.num_tokens for child in self.children)

    @cached_property
    def depth(self) -> int:
        """Number of its levels."""
        return 1 + max((child.depth for child in self.children), default=0)

    @property
    def documents(self) -> Iterator[int]:
        """Numbers of its documents."""
        yield from self.ending
        for child in self.children:
            yield from child.documents

    def joins_at(self, level: int) -> int:
        """How often the attention of a token is joined from two parts, if its root is on this level: once for each level
        above the token."""
        return level * self.length + sum(child.joins_at(level + 1) for child in self.children)

    @cached_property
    def num_joins(self) -> int:
        return self.joins_at(0)

    @cached_property
    def squares(self) -> int:
        """Squared lengths of its documents, less what they share: twice the number of pairs in causal attention."""
        return self.end**2 - self.start**2 + sum(child.squares for child in self.children)


def plain_trees(documents: Sequence[Document]) -> list[TreeBranch]:
    """Each document as a tree of its own."""
    return [TreeBranch(number, 0, len(one.tokens), ending=(number,)) for number, one in enumerate(documents)]


def grow_trees(documents: Sequence[Document], *, least: int, join: float, levels: int = LEVELS) -> list[TreeBranch]:
    """Trees of at most `levels` levels in which documents share what they begin with, where that pays: a run of at least
    `least` tokens that saves more than it costs. `join` is the price of one join of attention, in tokens."""
    return _Grower(_compared(documents), max(1, least), join, levels).fork(range(len(documents)), 0, 0, 0)


def _compared(documents: Sequence[Document]) -> list[Tokens]:
    """A number for each token, the same where documents can share it: where the token is, and the experts recorded for it."""
    recorded = [one.routes for one in documents if one.routes is not None]
    if not recorded:
        return [one.tokens for one in documents]
    width = recorded[0].shape[1]
    rows = np.concatenate([_with_experts(one, width) for one in documents])
    whole = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    numbers = np.unique(whole, return_inverse=True)[1].astype(np.int32)
    return np.split(numbers, np.cumsum([len(one.tokens) for one in documents])[:-1])


def _with_experts(document: Document, width: int) -> NDArray[np.uint8]:
    """The bytes of each token and of its experts, and whether these were recorded."""
    rows = np.zeros((len(document.tokens), 5 + width), dtype=np.uint8)
    rows[:, :4] = document.tokens.astype("<i4").view(np.uint8).reshape(-1, 4)
    if document.routes is not None:
        rows[:-1, 4], rows[:-1, 5:] = 1, document.routes
    return rows


class _Grower:
    def __init__(self, tokens: Sequence[Tokens], least: int, join: float, levels: int) -> None:
        self._tokens, self._least, self._join, self._levels = tokens, least, join, levels

    def fork(self, items: Iterable[int], start: int, shared: int, level: int) -> list[TreeBranch]:
        """Branches that begin at `start`, of documents that are equal up to `shared`, in the order of documents."""
        ways: dict[int, list[int]] = {}  # by the next token, -1 at the end
        for item in items:
            ways.setdefault(int(self._tokens[item][shared]) if shared < len(self._tokens[item]) else -1, []).append(
                item
            )
        found = [branch for token, same in ways.items() for branch in self._way(same, start, shared, level, token < 0)]
        return sorted(found, key=lambda branch: branch.document)

    def _way(self, items: Sequence[int], start: int, shared: int, level: int, ended: bool) -> list[TreeBranch]:
        """The cheaper of two: a branch that all of these documents share, or none up to where they part."""
        end = shared if ended else self._common(items, shared)
        apart = [self._leaf(item, start) for item in items]
        if len(items) == 1 or level == self._levels - 1:
            return apart
        if not ended:
            apart = self.fork(items, start, end, level)
        if end - start < self._least:
            return apart
        ending = tuple(item for item in items if len(self._tokens[item]) == end)
        going_on = [item for item in items if len(self._tokens[item]) > end]
        joined = TreeBranch(items[0], start, end, tuple(self.fork(going_on, end, end, level + 1)), ending)
        return [joined] if self._price([joined], level) < self._price(apart, level) else apart

    def _leaf(self, item: int, start: int) -> TreeBranch:
        return TreeBranch(item, start, len(self._tokens[item]), ending=(item,))

    def _price(self, branches: Iterable[TreeBranch], level: int) -> float:
        return sum(branch.num_tokens + self._join * branch.joins_at(level) for branch in branches)

    def _common(self, items: Sequence[int], shared: int) -> int:
        """Number of tokens that all of these documents begin with, given that it is at least `shared`."""
        first = self._tokens[items[0]]
        end = len(first)
        for item in items[1:]:
            other = self._tokens[item]
            end = min(end, len(other))
            differs = first[shared:end] != other[shared:end]
            end = shared + int(differs.argmax()) if differs.any() else end
        return end


def cut(tree: TreeBranch, limit: int) -> list[TreeBranch]:
    """The tree in parts of at most `limit` tokens, each of which repeats what its documents share. A longer document is a
    part of its own."""
    if tree.num_tokens <= limit or not tree.children:
        return [tree]
    below = max(1, limit - tree.length)
    pieces = [piece for child in tree.children for piece in cut(child, below)]
    bins = balance([one.num_tokens for one in pieces], below)
    parts = [[pieces[number] for number in numbers] for numbers in bins if numbers]
    return [_with(tree, part, tree.ending if number == 0 else ()) for number, part in enumerate(parts)]


def _with(tree: TreeBranch, children: Sequence[TreeBranch], ending: tuple[int, ...]) -> TreeBranch:
    """The branch with some of its children; one with a single child and nothing else is part of that child."""
    if len(children) == 1 and not ending:
        return replace(children[0], start=tree.start)
    return replace(
        tree, document=min([*ending, *(one.document for one in children)]), children=tuple(children), ending=ending
    )
