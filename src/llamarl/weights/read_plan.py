"""The plan of a transfer as seen from one target: what a reader reads from each rank that publishes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from llamarl.errors import InputError
from llamarl.families.parameters import tied_name
from llamarl.layout.boxes import Box, relative
from llamarl.layout.plan import ShardSpec, plan_transfer, reshardings_of
from llamarl.model.shards import Parameters, Shard, shards_of
from llamarl.weights.memory import ShardRead, SlotManifest
from llamarl.weights.wire import SlotShard


class ReadPlan:
    """The shards that a reader fills. Parameters given without a box are whole."""

    def __init__(self, parameters: Parameters) -> None:
        self.shards = shards_of(parameters)
        self._whole = {name for name, held in parameters.items() if isinstance(held, Tensor)}

    @property
    def slot_shards(self) -> tuple[SlotShard, ...]:
        """The reader's shards in the form in which ranks exchange them; their offsets are unused."""
        return tuple(
            SlotShard(name, shard.box, str(shard.tensor.dtype).removeprefix("torch."), 0)
            for name, shard in self.shards.items()
        )

    def reads(self, manifests: Sequence[SlotManifest]) -> dict[int, list[ShardRead]]:
        """Maps each rank that publishes to the reads from its slots. InputError if these do not fit the reader's shards."""
        published = [{shard.name: shard for shard in manifest.shards} for manifest in manifests]
        self.check([manifest.shards for manifest in manifests], cast=True)
        sources = [{name: shard.spec for name, shard in rank.items()} for rank in published]
        widths = {name: spec.item_bytes for rank in sources for name, spec in rank.items()}
        target = {name: ShardSpec(shard.box, widths[source_of(name, widths)]) for name, shard in self.shards.items()}
        found: dict[int, list[ShardRead]] = defaultdict(list)
        for move in plan_transfer(reshardings_of(sources, [target]), len(sources), 1):
            shard = self.shards[move.target_name]
            view = shard.tensor[relative(move.box, shard.box)]
            found[move.source].append(ShardRead(published[move.source][move.source_name], move.box, view))
        return dict(found)

    def check(self, published: Iterable[Iterable[SlotShard]], *, cast: bool) -> None:
        """InputError unless exactly the reader's parameters were published, in its types or (with `cast`) others."""
        sources: dict[str, list[SlotShard]] = defaultdict(list)
        for source in chain.from_iterable(published):
            sources[source.name].append(source)
        if surplus := sources.keys() - {source_of(name, sources) for name in self.shards}:
            raise InputError(f"weights: '{min(surplus)}' was published, but is not among the reader's parameters")
        for name, shard in self.shards.items():
            found = sources.get(source_of(name, sources), [])
            _check_size(name, shard, found, whole=name in self._whole)
            _check_type(name, shard.tensor.dtype, getattr(torch, found[0].dtype), cast=cast)


def source_of(name: str, published: Mapping[str, object]) -> str:
    """Name under which a parameter is published. A tied head is published as the embedding."""
    return name if name in published else tied_name(name)


def _check_size(name: str, shard: Shard, sources: Sequence[SlotShard], *, whole: bool) -> None:
    if not sources:
        raise InputError(f"weights: '{name}' was not published")
    if whole and (size := _extent(sources)) != shard.box:
        raise InputError(f"weights: '{name}' is {_sizes(size)} where published, and {_sizes(shard.box)} at the reader")


def _check_type(name: str, here: torch.dtype, there: torch.dtype, *, cast: bool) -> None:
    if here != there and 1 in (here.itemsize, there.itemsize):
        raise InputError(f"weights: '{name}' was published as {there} and cannot become {here} without its scales")
    if here != there and not cast:
        raise InputError(f"weights: '{name}' travels as {there}, but the reader holds {here}; publish in its precision")


def _extent(sources: Sequence[SlotShard]) -> Box:
    """The smallest box around all shards."""
    return tuple(
        (min(a for a, _ in dim), max(b for _, b in dim)) for dim in zip(*(one.box for one in sources), strict=True)
    )


def _sizes(box: Box) -> list[int]:
    return [end - first for first, end in box]
