"""What a trainer rank puts on the wire: its parameters as they are, cast, or quantized to fp8 with their scales.

fp8 is e4m3 with one fp32 scale per output row of each generator rank's part: weight = fp8 * scale. A row that several trainer
ranks share gets its scale from the largest of all of them, for which `combine_max` is called once per publication.
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
LEAST_SCALE = 2.0**-100  # its inverse is a number too
CombineMax = Callable[[Tensor], None]


class Segments(Struct, frozen=True):
    """How the columns of a parameter are shared by generator ranks: a row has one scale for each."""

    columns: int
    width: int

    @property
    def count(self) -> int:
        return -(-self.columns // self.width)


class WireFormat(Struct, frozen=True):
    """The types that travel. Without a precision, those that the trainer holds."""

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
    """One tensor in a slot or on the way."""

    name: str
    box: Box
    dtype: str
    offset: int

    @property
    def holding(self) -> ShardSpec:
        return ShardSpec(self.box, getattr(torch, self.dtype).itemsize)

    def view(self, data: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        size = shape_of(self.box)
        raw = data[self.offset : self.offset + torch.Size(size).numel() * dtype.itemsize]
        return raw.view(dtype).view(size)


class Copied(NamedTuple):
    """A parameter that goes in as it is, or cast."""

    entry: SlotShard
    tensor: Tensor


class Quantized(NamedTuple):
    entry: SlotShard
    scale: SlotShard
    shard: Shard
    segments: Segments


class Staging:
    """The entries of one rank, and how they are made from its parameters."""

    def __init__(self, parameters: Parameters, wire: WireFormat, combine_max: CombineMax | None = None) -> None:
        shards = shards_of(parameters)
        self._combine_max = combine_max
        self.layout: FlatLayout = flat_layout(_specs(shards, wire))
        offsets = {placed.spec.name: placed.offset for placed in self.layout.tensors}
        self.copied: list[Copied] = []
        self.quantized: list[Quantized] = []
        for name, shard in shards.items():
            dtype = wire.dtype(name, shard.tensor.dtype)
            entry = SlotShard(name, shard.box, _name(dtype), offsets[name])
            if name in wire.segments:
                scale = SlotShard(
                    name + SCALE, scale_box(shard.box, wire.segments[name].width), "float32", offsets[name + SCALE]
                )
                self.quantized.append(Quantized(entry, scale, shard, wire.segments[name]))
            else:
                self.copied.append(Copied(entry, shard.tensor))
        if combine_max is None:
            _refuse_shared_rows(self.quantized)

    @property
    def shares_rows(self) -> bool:
        """Whether scales must be agreed on with other ranks."""
        return self._combine_max is not None

    @property
    def entries(self) -> tuple[SlotShard, ...]:
        scales = (entry for part in self.quantized for entry in (part.entry, part.scale))
        return (*(part.entry for part in self.copied), *scales)

    def quantize(self, data: Tensor, parts: Sequence[Quantized] | None = None) -> None:
        """Fill the places of quantized parameters and their scales: of all, or of those that no kernel has filled."""
        parts = self.quantized if parts is None else parts
        if not parts:
            return
        largest = [row_maxima(part.shard, part.segments) for part in parts]
        if self._combine_max is not None:
            flat = torch.cat([one.view(-1) for one in largest])
            self._combine_max(flat)
            split = torch.split(flat, [one.numel() for one in largest])
            largest = [part.view_as(one) for part, one in zip(split, largest, strict=True)]
        for part, maxima_RS in zip(parts, largest, strict=True):
            first, end = part.scale.box[1]
            scales_RS = scales_of(maxima_RS[:, first:end])
            part.scale.view(data).copy_(scales_RS)
            quantize_into(part.entry.view(data), part.shard, part.segments, scales_RS)


def row_maxima(shard: Shard, segments: Segments) -> Tensor:
    """[rows, segments]: the largest magnitude of each row in each segment of columns; 0 where this rank holds none of it."""
    maxima_RS = shard.tensor.new_zeros((shard.tensor.shape[0], segments.count), dtype=torch.float32)
    for segment, columns in _columns(shard.box, segments):
        maxima_RS[:, segment] = shard.tensor[:, columns].abs().amax(dim=1)
    return maxima_RS


def scales_of(maxima: Tensor) -> Tensor:
    """So that the largest value becomes the largest fp8 number; a row of zeros keeps a scale of 1."""
    return torch.where(maxima > 0, (maxima * (1 / MAX_FP8)).clamp(min=LEAST_SCALE), torch.ones_like(maxima))


def quantize_into(target: Tensor, shard: Shard, segments: Segments, scales_RS: Tensor) -> None:
    first_segment = scale_box(shard.box, segments.width)[1][0]
    for segment, columns in _columns(shard.box, segments):
        scaled = shard.tensor[:, columns].float() * scales_RS[:, segment - first_segment, None].reciprocal()
        target[:, columns] = scaled.clamp_(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


def _columns(box: Box, segments: Segments) -> list[tuple[int, slice]]:
    """The segments that a box touches, each with the columns of the local tensor that lie in it."""
    first, end = box[1]
    if first >= end or box[0][0] >= box[0][1]:
        return []
    touched = range(*scale_box(box, segments.width)[1])
    edges = [(max(first, index * segments.width), min(end, (index + 1) * segments.width)) for index in touched]
    return [(index, slice(a - first, b - first)) for index, (a, b) in zip(touched, edges, strict=True)]


def _refuse_shared_rows(parts: list[Quantized]) -> None:
    for part in parts:
        (first, end), width = part.shard.box[1], part.segments.width
        if first % width or (end % width and end < part.segments.columns):
            raise InputError(
                f"weights: fp8 has one scale per {width} columns of '{part.entry.name}', but a trainer rank holds columns "
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
