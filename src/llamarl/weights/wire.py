"""What a trainer rank puts on the wire: its shards as they are, cast, or quantized to fp8 with their scales.

fp8 is e4m3 with one fp32 scale per output row of each generator rank's shard: weight = fp8 * scale. Where several trainer
ranks share a row, its scale comes from the largest value of all of them: `combine_max` is called once per publication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from llamarl.errors import InputError
from llamarl.families.parameters import parameters
from llamarl.layout.boxes import Box, shape_of
from llamarl.layout.flat import FlatLayout, TensorSpec, flat_layout
from llamarl.layout.mesh import PRECISIONS
from llamarl.layout.model import FP8, SCALE, WIDE, scale_box, segment_columns, wire_dtype
from llamarl.layout.plan import ShardSpec
from llamarl.model.shards import Parameters, Shard, shards_of
from llamarl.model_spec import ModelSpec

MAX_FP8 = 448.0
LEAST_SCALE = 2.0**-100  # its inverse is still finite
CombineMax = Callable[[Tensor], None]


class Segments(Struct, frozen=True):
    """How generator ranks share the columns of a parameter: a row has one scale for each segment of `width` columns."""

    columns: int
    width: int

    @property
    def count(self) -> int:
        return -(-self.columns // self.width)


class WireFormat(Struct, frozen=True):
    """Types in which parameters travel. Without a precision, they travel as the trainer holds them."""

    precision: str = ""
    segments: Mapping[str, Segments] = {}

    @classmethod
    def for_generator(cls, precision: str, shape: ModelSpec, tp: int = 1) -> WireFormat:
        narrow = [one for one in parameters(shape).values() if wire_dtype(one, precision) == FP8]
        return cls(precision, {one.name: Segments(one.shape[1], segment_columns(one, tp)) for one in narrow})

    def dtype(self, name: str, held: torch.dtype) -> torch.dtype:
        if not self.precision:
            return held
        dtype = PRECISIONS[self.precision]
        found: torch.dtype = getattr(torch, WIDE if dtype == FP8 and name not in self.segments else dtype)
        return found


class SlotShard(Struct, frozen=True, array_like=True):
    """A shard's place in a slot: its name, box and type, and the offset of its first byte."""

    name: str
    box: Box
    dtype: str
    offset: int

    @property
    def spec(self) -> ShardSpec:
        return ShardSpec(self.box, getattr(torch, self.dtype).itemsize)

    def view(self, data: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        size = shape_of(self.box)
        raw = data[self.offset : self.offset + torch.Size(size).numel() * dtype.itemsize]
        return raw.view(dtype).view(size)


class Copied(NamedTuple):
    """A shard that is copied into a slot as it is, or cast."""

    target: SlotShard
    tensor: Tensor


class Quantized(NamedTuple):
    """A shard that is quantized into a slot, with its scales."""

    target: SlotShard
    scale: SlotShard
    shard: Shard
    segments: Segments


class Staging:
    """The slot shards of one rank, and how they are made from its parameters."""

    def __init__(self, parameters: Parameters, wire: WireFormat, combine_max: CombineMax | None = None) -> None:
        shards = shards_of(parameters)
        self._combine_max = combine_max
        self.layout: FlatLayout = flat_layout(_specs(shards, wire))
        offsets = {placed.spec.name: placed.offset for placed in self.layout.tensors}
        self.copied: list[Copied] = []
        self.quantized: list[Quantized] = []
        for name, shard in shards.items():
            dtype = wire.dtype(name, shard.tensor.dtype)
            target = SlotShard(name, shard.box, _name(dtype), offsets[name])
            if name in wire.segments:
                scale = SlotShard(
                    name + SCALE, scale_box(shard.box, wire.segments[name].width), "float32", offsets[name + SCALE]
                )
                self.quantized.append(Quantized(target, scale, shard, wire.segments[name]))
            else:
                self.copied.append(Copied(target, shard.tensor))
        if combine_max is None:
            _refuse_shared_rows(self.quantized)

    @property
    def shares_rows(self) -> bool:
        """Whether ranks share rows, so that they must agree on scales."""
        return self._combine_max is not None

    @property
    def slot_shards(self) -> tuple[SlotShard, ...]:
        scaled = (shard for one in self.quantized for shard in (one.target, one.scale))
        return (*(one.target for one in self.copied), *scaled)

    def quantize(self, data: Tensor, chosen: Sequence[Quantized] | None = None) -> None:
        """Writes quantized shards and their scales into a slot: all of them, or those `chosen`, if kernels wrote the rest."""
        chosen = self.quantized if chosen is None else chosen
        if not chosen:
            return
        largest = [row_maxima(one.shard, one.segments) for one in chosen]
        if self._combine_max is not None:
            flat = torch.cat([maxima_RS.view(-1) for maxima_RS in largest])
            self._combine_max(flat)
            combined = torch.split(flat, [maxima_RS.numel() for maxima_RS in largest])
            largest = [new.view_as(maxima_RS) for new, maxima_RS in zip(combined, largest, strict=True)]
        for one, maxima_RS in zip(chosen, largest, strict=True):
            first, end = one.scale.box[1]
            scales_RS = scales_of(maxima_RS[:, first:end])
            one.scale.view(data).copy_(scales_RS)
            quantize_into(one.target.view(data), one.shard, one.segments, scales_RS)


def row_maxima(shard: Shard, segments: Segments) -> Tensor:
    """Largest magnitude of each row in each segment of columns, [rows, segments]; 0 where this rank holds none of it."""
    maxima_RS = shard.tensor.new_zeros((shard.tensor.shape[0], segments.count), dtype=torch.float32)
    for segment, columns in _columns(shard.box, segments):
        maxima_RS[:, segment] = shard.tensor[:, columns].abs().amax(dim=1)
    return maxima_RS


def scales_of(maxima: Tensor) -> Tensor:
    """Scales that map the largest value to the largest fp8 number; a row of zeros has a scale of 1."""
    return torch.where(maxima > 0, (maxima * (1 / MAX_FP8)).clamp(min=LEAST_SCALE), torch.ones_like(maxima))


def quantize_into(target: Tensor, shard: Shard, segments: Segments, scales_RS: Tensor) -> None:
    first_segment = scale_box(shard.box, segments.width)[1][0]
    for segment, columns in _columns(shard.box, segments):
        scaled = shard.tensor[:, columns].float() * scales_RS[:, segment - first_segment, None].reciprocal()
        target[:, columns] = scaled.clamp_(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


def _columns(box: Box, segments: Segments) -> list[tuple[int, slice]]:
    """Segments that a box touches, each with the columns of the local tensor that lie in it."""
    first, end = box[1]
    if first >= end or box[0][0] >= box[0][1]:
        return []
    touched = range(*scale_box(box, segments.width)[1])
    edges = [(max(first, index * segments.width), min(end, (index + 1) * segments.width)) for index in touched]
    return [(index, slice(a - first, b - first)) for index, (a, b) in zip(touched, edges, strict=True)]


def _refuse_shared_rows(quantized: list[Quantized]) -> None:
    for one in quantized:
        (first, end), width = one.shard.box[1], one.segments.width
        if first % width or (end % width and end < one.segments.columns):
            raise InputError(
                f"weights: fp8 has one scale per {width} columns of '{one.target.name}', but a trainer rank holds columns "
                f"{first}:{end}; give the trainer no more tensor parallelism than the generator, or pass combine_max"
            )


def _specs(shards: Mapping[str, Shard], wire: WireFormat) -> list[TensorSpec]:
    specs = []
    for name, shard in shards.items():
        dtype = _name(wire.dtype(name, shard.tensor.dtype))
        specs.append(TensorSpec(name, tuple(shard.tensor.shape), dtype))
        if name in wire.segments:
            size = shape_of(scale_box(shard.box, wire.segments[name].width))
            specs.append(TensorSpec(name + SCALE, size, "float32"))
    return specs


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
