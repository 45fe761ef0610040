"""What a reader takes from each rank that publishes: the plan of the transfer, as seen from one target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from llamarl.errors import InputError
from llamarl.families.parameters import tied_name
from llamarl.layout.boxes import Box, relative
from llamarl.layout.plan import ShardSpec, plan_transfer, shard_patterns
from llamarl.model.shards import Parameters, Shard, shards_of
from llamarl.weights.memory import ShardRead, SlotManifest
from llamarl.weights.wire import SlotShard


class ReadPlan:
    """A reader's own tensors. Those given without a box are whole parameters."""

    def __init__(self, parameters: Parameters) -> None:
        self.shards = shards_of(parameters)
        self._whole = {name for name, held in parameters.items() if isinstance(held, Tensor)}

    @property
    def entries(self) -> tuple[SlotShard, ...]:
        return tuple(
            SlotShard(name, shard.box, str(shard.tensor.dtype).removeprefix("torch."), 0)
            for name, shard in self.shards.items()
        )

    def pieces(self, manifests: Sequence[SlotManifest]) -> dict[int, list[ShardRead]]:
        """By rank that publishes. InputError when what is published is not what is wanted."""
        published = [{entry.name: entry for entry in manifest.entries} for manifest in manifests]
        self.check([manifest.entries for manifest in manifests], cast=True)
        sources = [{name: entry.holding for name, entry in rank.items()} for rank in published]
        widths = {name: held.item_bytes for rank in sources for name, held in rank.items()}
        target = {name: ShardSpec(shard.box, widths[source_of(name, widths)]) for name, shard in self.shards.items()}
        found: dict[int, list[ShardRead]] = defaultdict(list)
        for move in plan_transfer(shard_patterns(sources, [target]), len(sources), 1):
            shard = self.shards[move.target_name]
            view = shard.tensor[relative(move.box, shard.box)]
            found[move.source].append(ShardRead(published[move.source][move.source_name], move.box, view))
        return dict(found)

    def check(self, published: Iterable[Iterable[SlotShard]], *, cast: bool) -> None:
        """InputError unless exactly the wanted parameters were published, in types that can be taken as they are or cast."""
        entries: dict[str, list[SlotShard]] = defaultdict(list)
        for entry in chain.from_iterable(published):
            entries[entry.name].append(entry)
        if surplus := entries.keys() - {source_of(name, entries) for name in self.shards}:
            raise InputError(f"weights: '{min(surplus)}' was published, but is not among the reader's parameters")
        for name, shard in self.shards.items():
            found = entries.get(source_of(name, entries), [])
            _check_size(name, shard, found, whole=name in self._whole)
            _check_type(name, shard.tensor.dtype, getattr(torch, found[0].dtype), cast=cast)


def source_of(name: str, published: Mapping[str, object]) -> str:
    """The name under which a parameter is published: a tied head's is the embedding's."""
    return name if name in published else tied_name(name)


def _check_size(name: str, shard: Shard, entries: Sequence[SlotShard], *, whole: bool) -> None:
    if not entries:
        raise InputError(f"weights: '{name}' was not published")
    if whole and (size := _extent(entries)) != shard.box:
        raise InputError(f"weights: '{name}' is {_sizes(size)} where published, and {_sizes(shard.box)} at the reader")


def _check_type(name: str, here: torch.dtype, there: torch.dtype, *, cast: bool) -> None:
    if here != there and 1 in (here.itemsize, there.itemsize):
        raise InputError(f"weights: '{name}' was published as {there} and cannot become {here} without its scales")
    if here != there and not cast:
        raise InputError(f"weights: '{name}' travels as {there}, but the reader holds {here}; publish in its precision")


def _extent(entries: Sequence[SlotShard]) -> Box:
    """The smallest box around all of them."""
    return tuple(
        (min(a for a, _ in dim), max(b for _, b in dim)) for dim in zip(*(entry.box for entry in entries), strict=True)
    )


def _sizes(box: Box) -> list[int]:
    return [end - first for first, end in box]
