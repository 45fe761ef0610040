"""TransferPlan: which box of which parameter goes from which source rank to which target rank.

The plan is computed once from the shards of both ends. Every target byte is received exactly once, from a rank that holds it;
where several ranks hold it, they share the work. Parameters with equal shards are planned together as one `Resharding`, so
that the plan of a large model on many ranks stays small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import gcd

from msgspec import Struct

from llamarl.errors import InputError
from llamarl.families.parameters import tied_name
from llamarl.layout.boxes import Box, intersect, split_rows, subtract, volume

MIN_SHARED_BYTES = 1 << 20  # a smaller box is not cut to spread it over the ranks that hold it


class ShardSpec(Struct, frozen=True):
    """The box of a parameter that one rank holds, and the width of its elements on the wire."""

    box: Box
    item_bytes: int


class Resharding(Struct, frozen=True):
    """Parameters with equal shards: on every rank of both ends, all have the same box. None: that rank holds nothing."""

    names: tuple[tuple[str, str], ...]  # at the source and at the target; they differ only for a tied head
    item_bytes: int
    sources: tuple[Box | None, ...]
    targets: tuple[Box | None, ...]

    def num_bytes(self, box: Box) -> int:
        """Bytes of a box of all parameters together."""
        return volume(box) * self.item_bytes * len(self.names)


class Move(Struct, frozen=True, array_like=True):
    """This box of every parameter of a resharding goes from this source to this target."""

    source: int
    target: int
    box: Box


class NamedMove(Struct, frozen=True, array_like=True):
    """A move of one parameter, with its name at both ends."""

    source: int
    target: int
    source_name: str
    target_name: str
    box: Box


class TransferPlan:
    """All moves of a transfer, by resharding."""

    def __init__(
        self, reshardings: Sequence[Resharding], moves: Sequence[Sequence[Move]], sources: int, targets: int
    ) -> None:
        self.reshardings, self.moves = tuple(reshardings), tuple(map(tuple, moves))
        self.num_sources, self.num_targets = sources, targets

    def __iter__(self) -> Iterator[NamedMove]:
        """Every move by name, parameter after parameter. The order is the same on all ranks."""
        for resharding, moves in zip(self.reshardings, self.moves, strict=True):
            for source_name, target_name in resharding.names:
                for move in moves:
                    yield NamedMove(move.source, move.target, source_name, target_name, move.box)

    @cached_property
    def bytes_between(self) -> Mapping[tuple[int, int], int]:
        """Maps (source, target) to the bytes that go between them."""
        found = defaultdict[tuple[int, int], int](int)
        for resharding, moves in zip(self.reshardings, self.moves, strict=True):
            for move in moves:
                found[move.source, move.target] += resharding.num_bytes(move.box)
        return found

    @cached_property
    def sent_bytes(self) -> list[int]:
        return self._bytes_of(self.num_sources, 0)

    @cached_property
    def received_bytes(self) -> list[int]:
        return self._bytes_of(self.num_targets, 1)

    def _bytes_of(self, ranks: int, end: int) -> list[int]:
        found = [0] * ranks
        for ends, num_bytes in self.bytes_between.items():
            found[ends[end]] += num_bytes
        return found

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes)

    @property
    def minimum_bytes(self) -> int:
        """Bytes that all targets hold: the least that can be received."""
        return sum(one.num_bytes(box) for one in self.reshardings for box in one.targets if box is not None)


def plan_transfer(reshardings: Iterable[Resharding], num_sources: int, num_targets: int) -> TransferPlan:
    """Plans large reshardings first, so that the small ones even out the load of the sources."""
    ordered = sorted(reshardings, key=lambda resharding: -_target_bytes(resharding))
    load = [0] * num_sources
    return TransferPlan(ordered, [_moves_of(resharding, load) for resharding in ordered], num_sources, num_targets)


def reshardings_of(
    sources: Sequence[Mapping[str, ShardSpec]], targets: Sequence[Mapping[str, ShardSpec]]
) -> list[Resharding]:
    """Groups the shards of all ranks. Parameters that no target holds are left out."""
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
    return [Resharding(tuple(names), width, *boxes) for (width, *boxes), names in alike.items()]


def _boxes(ranks: Sequence[Mapping[str, ShardSpec]], name: str) -> tuple[Box | None, ...]:
    return tuple(rank[name].box if name in rank else None for rank in ranks)


def _target_bytes(resharding: Resharding) -> int:
    return max((resharding.num_bytes(box) for box in resharding.targets if box is not None), default=0)


def _ranks_by_box(boxes: Iterable[Box | None]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = defaultdict(list)
    for rank, box in enumerate(boxes):
        if box is not None and volume(box):
            found[box].append(rank)
    return found


def _moves_of(resharding: Resharding, load: list[int]) -> list[Move]:
    holders = _ranks_by_box(resharding.sources)
    moves = []
    for target_box, targets in _ranks_by_box(resharding.targets).items():
        pieces = _cover(resharding, target_box, holders, len(targets))
        cover = [(box, sources, resharding.num_bytes(box)) for box, sources in pieces]
        for target in targets:
            for box, sources, num_bytes in cover:
                source = min(sources, key=load.__getitem__)
                load[source] += num_bytes
                moves.append(Move(source, target, box))
    return moves


def _cover(
    resharding: Resharding, target_box: Box, holders: Mapping[Box, list[int]], num_targets: int
) -> Iterator[tuple[Box, list[int]]]:
    """Cuts the target's box into boxes that do not overlap, each with the ranks that hold it. Where several ranks hold a box,
    it is cut further, so that each of them can send an equal share."""
    missing = [target_box]
    for held, ranks in holders.items():
        left: list[Box] = []
        for box in missing:
            common = intersect(box, held)
            num_bytes = volume(common) * resharding.item_bytes
            if not num_bytes:
                left.append(box)
                continue
            left.extend(subtract(box, common))
            parts = max(1, min(len(ranks) // gcd(len(ranks), num_targets), num_bytes // MIN_SHARED_BYTES))
            yield from ((box, ranks) for box in split_rows(common, parts))
        missing = left
    if missing:
        raise InputError(f"weights: no source holds {resharding.names[0][0]}{_shown(missing[0])}")


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{first}:{end}" for first, end in box) + "]"
