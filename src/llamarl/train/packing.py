"""Packs documents of all lengths to a token budget, balanced over ranks and passes by tokens.

A pack is the input of one forward and backward pass: rows of trees one behind the other (`trees.py`); a document that shares
nothing is a tree of its own. On a GPU a pack is one long row, since attention there skips everything outside a document.
Elsewhere rows are as short as the largest tree allows, since masked attention computes whole rows. The only padding is at the
tail of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarl.algo.batch import POLICY, Document, Streams, TokenBatch
from llamarl.model.gpu_paths import upload
from llamarl.routes import RouteFormat
from llamarl.train.balance import balance
from llamarl.train.trees import TreeBranch, cut, grow_trees, plain_trees

if TYPE_CHECKING:
    from llamarl.train.context import ContextShare

_SHORTEST_ROW = 64  # tokens; in shorter rows, the number of rows costs more than masked attention saves
TILE = 128  # tokens; a GPU's long row is padded to a multiple of this, so that its products have whole tiles
_LEAST_TAIL = (
    2  # tokens behind trees; compiled code would be made anew for a tail of none, and for one of a single token
)
PADDING = -1
NO_PARENT = -1
OWN_CHOICE = -1  # in place of an expert's id: the policy chooses the token's experts itself


@dataclass(frozen=True)
class Node:
    """A run of tokens in a pack, with the node whose tokens come before it in all its documents."""

    parent: int  # index in the pack's nodes, before its own; NO_PARENT: it begins its documents
    first: int  # index of its first token, in rows * width
    start: int  # position of its first token in its documents
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def squares(self) -> int:
        """Twice the pairs of tokens in its causal attention to itself and to all before it."""
        return self.end**2 - self.start**2


class AnswerPlaces(NamedTuple):
    """Where answer tokens belong in their update."""

    sequence_N: Tensor  # document of the update
    within_N: Tensor  # number of the token among the sampled ones of its document


@dataclass(frozen=True)
class Pack:
    """R rows of T tokens, and their N answer tokens as flat vectors; with context parallelism, a rank's share of them."""

    tokens_RT: Tensor
    positions_RT: Tensor  # position of each token in its document
    nodes_RT: Tensor  # node of the pack that each token belongs to; PADDING at the tail of a row
    nodes: tuple[Node, ...]  # in the order of their tokens; one for each document where nothing is shared
    at_N: Tensor  # index (in R*T) of the hidden state that predicts each answer token
    targets_N: Tensor  # answer tokens
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor  # document of the update that each answer token belongs to
    within_N: Tensor  # number of each answer token among the sampled ones of its document
    staleness_N: Tensor
    fresh_N: Tensor  # whether the version being trained sampled the whole document
    columns: dict[str, Tensor]
    at: NDArray[np.int64]  # `at_N` on the host
    counts: bool = True  # False: a filler that keeps its rank in step with the others; nothing is learned from it
    streams: Streams = POLICY  # of all its documents
    share: ContextShare | None = None  # with context parallelism: the pack that this is a share of
    routes_RTLK: Tensor | None = (
        None  # experts to replay in each layer, or OWN_CHOICE; None: the policy chooses them all
    )

    @property
    def num_targets(self) -> int:
        return len(self.targets_N)

    @property
    def places(self) -> AnswerPlaces:
        return AnswerPlaces(self.sequence_N, self.within_N)

    @property
    def is_work(self) -> bool:
        """Whether its tokens belong to the update, also where it has no answer tokens of its own."""
        return self.counts or (self.share is not None and self.share.whole.counts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the nodes, in their order."""
        return tuple(node.length for node in self.nodes)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Level of each node: how many nodes are before it in its documents."""
        found: list[int] = []
        for node in self.nodes:
            found.append(0 if node.parent == NO_PARENT else found[node.parent] + 1)
        return tuple(found)

    @property
    def is_shared(self) -> bool:
        """Whether documents have nodes in common, so that attention leaves nodes."""
        return any(node.parent != NO_PARENT for node in self.nodes)

    def to(self, device: torch.device) -> Pack:
        if device.type == "cpu":
            return self
        moved = {name: upload(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        columns = {name: upload(value, device) for name, value in self.columns.items()}
        return replace(self, **moved, columns=columns)  # type: ignore[arg-type]

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


@dataclass(frozen=True)
class Sharing:
    """Whether documents share what they begin with, and what that costs. Prices are in tokens: 1 is what the products of all
    layers take for one."""

    mode: str = "off"  # off, on, or auto: only where it is cheaper than plain packs
    least: int = 1  # tokens; a shorter run is not shared
    square: float = 0.0  # price of a unit of `squares`
    join: float = 0.0  # price of joining the attention of a token from two parts
    part: float = 0.0  # price of each part of a pack's attention that trees of more than two levels add


PLAIN = Sharing()
# Of the price of two levels: a third one is compiled when it first comes, in the middle of a run.
_WORTH_COMPILING = 0.95
_PARTS = (1, 2, 4)  # candidates: the largest tree is this part of a rank's tokens


def make_packs(
    documents: Sequence[Document],
    budget: int,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    long_rows: bool,
    multiple_of: int = TILE,
    sharing: Sharing = PLAIN,
    routes: RouteFormat | None = None,
) -> list[Pack]:
    """This rank's packs of an update, which has at least one document. Every rank gets equally many packs, since every pass
    has collectives. Where documents are too few, a copy of the first one fills in and does not count. Long rows are padded
    to a multiple of `multiple_of`. With `routes`, packs have the experts that were recorded."""
    multiple = multiple_of if long_rows else 0
    layout = _layout(documents, budget, num_ranks, multiple, sharing)
    return [_pack(documents, trees, multiple, routes) for trees in layout[rank::num_ranks]]


Layout = list[list[TreeBranch]]  # the trees of each pack; pack n belongs to rank n % num_ranks


def _layout(documents: Sequence[Document], budget: int, num_ranks: int, multiple: int, sharing: Sharing) -> Layout:
    """The cheapest of some layouts: every document apart, or trees of several depths and sizes, since small ones are easier
    to deal out evenly and large ones save more. All trees of an update have the same limit of depth: a third level must save
    so much that chance does not make one, where answers to a prompt begin alike."""
    plain = _deal(plain_trees(documents), budget, num_ranks)
    if sharing.mode == "off":
        return plain
    price = partial(_price, num_ranks=num_ranks, multiple=multiple, sharing=sharing)
    trees = grow_trees(documents, least=sharing.least, join=sharing.join)
    if len(trees) == len(documents):
        return plain
    best = min(_of_all_sizes(trees, documents, budget, num_ranks, multiple), key=price)
    if sharing.part and max(tree.depth for tree in trees) > 2:
        trees = grow_trees(documents, least=sharing.least, join=sharing.join, levels=2)
        usual = min(_of_all_sizes(trees, documents, budget, num_ranks, multiple), key=price)
        best = best if price(best) < _WORTH_COMPILING * price(usual) else usual
    return best if sharing.mode == "on" else min(best, plain, key=price)


def _of_all_sizes(
    trees: Sequence[TreeBranch], documents: Sequence[Document], budget: int, num_ranks: int, multiple: int
) -> Iterator[Layout]:
    """Layouts of the same trees, cut into ever smaller ones."""
    each = -(-sum(tree.num_tokens for tree in trees) // num_ranks)
    largest = max(len(document.tokens) for document in documents)
    limits = {min(budget, max(largest, each // part)) for part in _PARTS}
    limits |= set() if multiple else {min(budget, part * largest) for part in _PARTS}
    for limit in sorted(limits, reverse=True):
        yield _deal([part for tree in trees for part in cut(tree, limit)], budget, num_ranks)


def _deal(trees: Sequence[TreeBranch], budget: int, num_ranks: int) -> Layout:
    bins = balance([tree.num_tokens for tree in trees], budget, num_ranks)
    return [[trees[number] for number in numbers] for numbers in bins]


def _price(layout: Layout, num_ranks: int, multiple: int, sharing: Sharing) -> float:
    """What the passes cost, one behind the other: each is as slow as its slowest rank."""
    each = [_pack_price(trees, multiple, sharing) if trees else 0.0 for trees in layout]
    return sum(max(each[start : start + num_ranks]) for start in range(0, len(each), num_ranks))


def _pack_price(trees: Sequence[TreeBranch], multiple: int, sharing: Sharing) -> float:
    rows, width = _rows(trees, multiple)
    if not multiple:  # masked attention computes whole squares
        return len(rows) * (width + sharing.square * 2 * width * width)
    joins, squares = sum(one.num_joins for one in trees), sum(one.squares for one in trees)
    depth = max(one.depth for one in trees)
    more_parts = depth * (depth - 1) // 2 - 1 if depth > 2 else 0
    return width + sharing.join * joins + sharing.square * squares + sharing.part * more_parts


def _rows(trees: Sequence[TreeBranch], multiple: int) -> tuple[list[list[TreeBranch]], int]:
    """The trees of each row, and the width of rows."""
    lengths = [tree.num_tokens for tree in trees]
    if multiple:
        tail = _LEAST_TAIL if any(tree.children for tree in trees) else 0
        return [list(trees)], -(-(sum(lengths) + tail) // multiple) * multiple
    width = max([_SHORTEST_ROW, *lengths])
    rows = [[trees[number] for number in row] for row in balance(lengths, width)]
    return rows, max(sum(tree.num_tokens for tree in row) for row in rows)


def _pack(
    documents: Sequence[Document], trees: Sequence[TreeBranch], multiple: int, routes: RouteFormat | None
) -> Pack:
    counts, trees = bool(trees), trees or plain_trees(documents[:1])
    rows, width = _rows(trees, multiple)
    order = _level_by_level if multiple else _tree_by_tree
    placed = [order(row) for row in rows]
    pack = _to_tensors(documents, placed, width, counts)
    return pack if routes is None else replace(pack, routes_RTLK=_routes(documents, placed, width, routes))


Placed = tuple[TreeBranch, int]  # a branch, and the index of its parent in the same row


def _tree_by_tree(trees: Sequence[TreeBranch]) -> list[Placed]:
    found: list[Placed] = []

    def place(branch: TreeBranch, parent: int) -> None:
        found.append((branch, parent))
        here = len(found) - 1
        for child in branch.children:
            place(child, here)

    for tree in trees:
        place(tree, NO_PARENT)
    return found


def _level_by_level(trees: Sequence[TreeBranch]) -> list[Placed]:
    """All roots that have children, then their children, and so on, then the roots without: so each part of attention has
    its queries together, and its keys (`tree_attention.py`)."""
    level: list[Placed] = [(tree, NO_PARENT) for tree in trees if tree.children]
    found: list[Placed] = []
    while level:
        first = len(found)
        found += level
        level = [(child, first + number) for number, (one, _) in enumerate(level) for child in one.children]
    return found + [(tree, NO_PARENT) for tree in trees if not tree.children]


def _to_tensors(documents: Sequence[Document], rows: Sequence[Sequence[Placed]], width: int, counts: bool) -> Pack:
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(tokens)
    numbers = np.full_like(tokens, PADDING)
    nodes: list[Node] = []
    ends: list[tuple[int, int]] = []  # each document, and the node that it ends with
    for row, branches in enumerate(rows):
        column, above = 0, len(nodes)
        for branch, parent in branches:
            end = column + branch.length
            tokens[row, column:end] = documents[branch.document].tokens[branch.start : branch.end]
            positions[row, column:end] = np.arange(branch.start, branch.end)
            numbers[row, column:end] = len(nodes)
            ends += [(item, len(nodes)) for item in branch.ending]
            whole = NO_PARENT if parent == NO_PARENT else above + parent
            nodes.append(Node(whole, row * width + column, branch.start, branch.end))
            column = end
        positions[row, column:] = np.arange(width - column)
    order = [item for item, _ in ends]
    packed = [documents[item] for item in order]
    sizes = np.array([document.num_answer_tokens for document in packed])
    before = [path_of(nodes, node)[document.places - 1] for document, (_, node) in zip(packed, ends, strict=True)]
    fresh = np.array([not document.staleness.any() for document in packed], dtype=bool)
    return Pack(
        tokens_RT=torch.from_numpy(tokens),
        positions_RT=torch.from_numpy(positions),
        nodes_RT=torch.from_numpy(numbers),
        nodes=tuple(nodes),
        at_N=torch.from_numpy(at := _concatenate(before, np.int64)),
        targets_N=torch.from_numpy(_concatenate([document.answer for document in packed], np.int64)),
        behavior_logprobs_N=_floats([document.behavior_logprobs for document in packed]),
        advantages_N=_floats([document.advantages for document in packed]),
        sequence_N=torch.from_numpy(np.repeat(np.array(order, dtype=np.int64), sizes)),
        within_N=torch.from_numpy(_concatenate([np.arange(size) for size in sizes], np.int64)),
        staleness_N=torch.from_numpy(_concatenate([document.staleness for document in packed], np.int64)),
        fresh_N=torch.from_numpy(np.repeat(fresh, sizes)),
        columns={name: _floats([document.columns[name] for document in packed]) for name in _columns(packed)},
        at=at,
        counts=counts,
        streams=packed[0].streams,
    )


def _routes(
    documents: Sequence[Document], rows: Sequence[Sequence[Placed]], width: int, form: RouteFormat
) -> Tensor | None:
    """Recorded experts of each token. Nothing was recorded of the last token of a document, of padding and of data."""
    if not any(documents[branch.document].routes is not None for row in rows for branch, _ in row):
        return None
    found = np.full((len(rows), width, form.layers, form.per_token), OWN_CHOICE, dtype=np.int16)
    for row, branches in enumerate(rows):
        column = 0
        for branch, _ in branches:
            recorded = documents[branch.document].routes
            if recorded is not None:
                ids = form.ids(recorded[branch.start : branch.end])
                found[row, column : column + len(ids)] = ids
            column += branch.length
    return torch.from_numpy(found)


def path_of(nodes: Sequence[Node], last: int) -> NDArray[np.int64]:
    """Index of each token of the document that ends with this node, in rows * width."""
    path = [np.arange(one.first, one.first + one.length) for one in _upwards(nodes, last)]
    return np.concatenate(path[::-1])


def _upwards(nodes: Sequence[Node], number: int) -> Iterator[Node]:
    while number != NO_PARENT:
        yield nodes[number]
        number = nodes[number].parent


def _columns(documents: Sequence[Document]) -> list[str]:
    """Names of the columns of the pack's documents; a role adds its columns to all of them or to none."""
    return sorted(set.intersection(*(set(document.columns) for document in documents))) if documents else []


def _floats(parts: Sequence[NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(_concatenate(parts, np.float32))


def _concatenate(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype)
