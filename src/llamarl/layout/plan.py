"""TransferPlan: which part of which parameter goes from which source rank to which target rank.

Computed once from what both ends hold. Every target byte is received exactly once, from a rank that holds it; where several
hold the same, they share the work. Parameters that are held alike are planned together as one kind, so that the plan of a
large model on many ranks stays small.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import gcd

from msgspec import Struct

from llamarl.errors import InputError
from llamarl.families.parameters import tied_name
from llamarl.layout.boxes import Box, intersect, split_rows, subtract, volume

MIN_SHARED_BYTES = 1 << 20  # smaller pieces are not cut only to spread them over those that hold them


class ShardSpec(Struct, frozen=True):
    """What one rank holds of one parameter, and how wide its elements are on the wire."""

    box: Box
    item_bytes: int


class ShardPattern(Struct, frozen=True):
    """Parameters that are held alike: by each source rank in the same box, and by each target rank too. None: not held."""

    names: tuple[tuple[str, str], ...]  # at the source, at the target; they differ for a tied head only
    item_bytes: int
    sources: tuple[Box | None, ...]
    targets: tuple[Box | None, ...]


class Move(Struct, frozen=True, array_like=True):
    """This part of every parameter of the kind goes from this source to this target."""

    source: int
    target: int
    box: Box


class NamedMove(Struct, frozen=True, array_like=True):
    source: int
    target: int
    source_name: str
    target_name: str
    box: Box


class TransferPlan:
    def __init__(
        self, kinds: Sequence[ShardPattern], moves: Sequence[Sequence[Move]], sources: int, targets: int
    ) -> None:
        self.kinds, self.moves = tuple(kinds), tuple(map(tuple, moves))
        self.num_sources, self.num_targets = sources, targets

    def __iter__(self) -> Iterator[NamedMove]:
        """Every move by name: parameter after parameter in the order of the kinds, the same for everybody."""
        for kind, moves in zip(self.kinds, self.moves, strict=True):
            for source_name, target_name in kind.names:
                for move in moves:
                    yield NamedMove(move.source, move.target, source_name, target_name, move.box)

    @cached_property
    def _bytes(self) -> tuple[Counter[int], Counter[int], Counter[tuple[int, int]]]:
        sent, received, between = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
        for kind, moves in zip(self.kinds, self.moves, strict=True):
            for move in moves:
                num_bytes = volume(move.box) * kind.item_bytes * len(kind.names)
                sent[move.source] += num_bytes
                received[move.target] += num_bytes
                between[move.source, move.target] += num_bytes
        return sent, received, between

    @property
    def sent_bytes(self) -> list[int]:
        return [self._bytes[0][rank] for rank in range(self.num_sources)]

    @property
    def received_bytes(self) -> list[int]:
        return [self._bytes[1][rank] for rank in range(self.num_targets)]

    @property
    def bytes_between(self) -> Mapping[tuple[int, int], int]:
        """By (source, target)."""
        return self._bytes[2]

    @property
    def total_bytes(self) -> int:
        return sum(self._bytes[0].values())

    @property
    def minimum_bytes(self) -> int:
        """What the targets hold: less cannot be received."""
        return sum(
            volume(box) * kind.item_bytes * len(kind.names)
            for kind in self.kinds
            for box in kind.targets
            if box is not None
        )


def plan_transfer(kinds: Iterable[ShardPattern], num_sources: int, num_targets: int) -> TransferPlan:
    """Large kinds first, so that the small ones even out what is left."""
    ordered = sorted(kinds, key=lambda kind: -_kind_bytes(kind))
    load = [0] * num_sources
    return TransferPlan(ordered, [_moves_of(kind, load) for kind in ordered], num_sources, num_targets)


def shard_patterns(
    sources: Sequence[Mapping[str, ShardSpec]], targets: Sequence[Mapping[str, ShardSpec]]
) -> list[ShardPattern]:
    """Group what the ranks really hold. What no target asks for is left out."""
    alike: dict[tuple[int, tuple[Box | None, ...], tuple[Box | None, ...]], list[tuple[str, str]]] = defaultdict(list)
    held = {name for source in sources for name in source}
    for name in dict.fromkeys(name for target in targets for name in target):
        at_source = name if name in held else tied_name(name)
        widths = {
            rank[key].item_bytes
            for ranks, key in ((sources, at_source), (targets, name))
            for rank in ranks
            if key in rank
        }
        if at_source not in held or len(widths) > 1:
            reason = "travels in another type than it is held in" if at_source in held else "is held by no source"
            raise InputError(f"weights: '{name}' {reason}")
        boxes = (_boxes(sources, at_source), _boxes(targets, name))
        alike[widths.pop(), *boxes].append((at_source, name))
    return [ShardPattern(tuple(names), width, *boxes) for (width, *boxes), names in alike.items()]


def _boxes(ranks: Sequence[Mapping[str, ShardSpec]], name: str) -> tuple[Box | None, ...]:
    return tuple(rank[name].box if name in rank else None for rank in ranks)


def _kind_bytes(kind: ShardPattern) -> int:
    return max((volume(box) for box in kind.targets if box is not None), default=0) * kind.item_bytes * len(kind.names)


def _ranks_by_box(boxes: Iterable[Box | None]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = defaultdict(list)
    for rank, box in enumerate(boxes):
        if box is not None and volume(box):
            found[box].append(rank)
    return found


def _moves_of(kind: ShardPattern, load: list[int]) -> list[Move]:
    holders = _ranks_by_box(kind.sources)
    moves = []
    for wanted, targets in _ranks_by_box(kind.targets).items():
        pieces = list(_cover(kind, wanted, holders, len(targets)))
        for target in targets:
            for piece, sources in pieces:
                source = min(sources, key=load.__getitem__)
                load[source] += volume(piece) * kind.item_bytes * len(kind.names)
                moves.append(Move(source, target, piece))
    return moves


def _cover(
    kind: ShardPattern, wanted: Box, holders: Mapping[Box, list[int]], num_targets: int
) -> Iterator[tuple[Box, list[int]]]:
    """The wanted box in pieces that do not overlap, each with the ranks that hold it. Where several hold a
    piece, it is cut so that all can give equally much."""
    missing = [wanted]
    for held, ranks in holders.items():
        left: list[Box] = []
        for box in missing:
            common = intersect(box, held)
            num_bytes = volume(common) * kind.item_bytes
            if not num_bytes:
                left.append(box)
                continue
            left.extend(subtract(box, common))
            parts = max(1, min(len(ranks) // gcd(len(ranks), num_targets), num_bytes // MIN_SHARED_BYTES))
            yield from ((piece, ranks) for piece in split_rows(common, parts))
        missing = left
    if missing:
        raise InputError(f"weights: no source holds {kind.names[0][0]}{_shown(missing[0])}")


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{first}:{end}" for first, end in box) + "]"
