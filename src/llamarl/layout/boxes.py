"""Boxes: which part of a parameter a rank holds, as (first, end) of every dimension. A single number has the empty box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(max(0, end - first) for first, end in box)


def volume(box: Box) -> int:
    return prod(shape_of(box))


def intersect(one: Box, other: Box) -> Box:
    """Their common part; it may be empty."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def subtract(box: Box, cut: Box) -> Iterator[Box]:
    """What is left of a box without `cut`, which lies inside it, as boxes that do not overlap."""
    for dim, ((first, end), (cut_first, cut_end)) in enumerate(zip(box, cut, strict=True)):
        for part in ((first, cut_first), (cut_end, end)):
            if part[0] < part[1]:
                yield (*cut[:dim], part, *box[dim + 1 :])


def relative(box: Box, frame: Box) -> tuple[slice, ...]:
    """Where a box lies inside the tensor that holds `frame`."""
    return tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(box, frame, strict=True))


def chunk(first: int, end: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Part `index` of a range, as torch.chunk cuts it: equal but for the last ones, which may be short or empty. Cuts lie
    between units only (a unit may be an attention head)."""
    units = -(-(end - first) // unit)
    per_part = -(-units // parts) * unit
    return min(end, first + index * per_part), min(end, first + (index + 1) * per_part)


def split_rows(box: Box, parts: int) -> list[Box]:
    """Cut along the first dimension, so that each part stays one contiguous piece of what was contiguous."""
    if not box or parts == 1:
        return [box]
    pieces = [(chunk(*box[0], parts, index), *box[1:]) for index in range(parts)]
    return [piece for piece in pieces if volume(piece)]
