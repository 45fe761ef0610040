"""A box is a part of a parameter: (first, end) of every dimension. The box of a single number has no dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(max(0, end - first) for first, end in box)


@lru_cache(maxsize=1 << 16)  # plans of many ranks ask for the same few boxes a million times
def volume(box: Box) -> int:
    return prod(shape_of(box))


def flat_index(place: Sequence[int], shape: Sequence[int]) -> int:
    """Number of a place, counted through all dimensions, the last one fastest."""
    number = 0
    for at, size in zip(place, shape, strict=True):
        number = number * size + at
    return number


def intersect(one: Box, other: Box) -> Box:
    """The overlap of two boxes; it may be empty."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def subtract(box: Box, cut: Box) -> Iterator[Box]:
    """The rest of a box without `cut`, which lies inside it, as boxes that do not overlap."""
    for dim, ((first, end), (cut_first, cut_end)) in enumerate(zip(box, cut, strict=True)):
        for rest in ((first, cut_first), (cut_end, end)):
            if rest[0] < rest[1]:
                yield (*cut[:dim], rest, *box[dim + 1 :])


def relative(box: Box, frame: Box) -> tuple[slice, ...]:
    """Slices of a box in the tensor that holds the box `frame`."""
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(box, frame, strict=True))


def chunk(first: int, end: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Part `index` of a range, as torch.chunk cuts it: all are equal, but the last ones may be short or empty. Units, such as
    attention heads, are never cut."""
    units = -(-(end - first) // unit)
    per_part = -(-units // parts) * unit
    return min(end, first + index * per_part), min(end, first + (index + 1) * per_part)


def split_rows(box: Box, parts: int) -> list[Box]:
    """Cuts a box along its first dimension, so that each part of a contiguous box is contiguous too."""
    if not box or parts == 1:
        return [box]
    cut = [(chunk(*box[0], parts, index), *box[1:]) for index in range(parts)]
    return [one for one in cut if volume(one)]
