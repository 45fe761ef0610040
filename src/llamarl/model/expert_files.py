"""How files hold experts: one tensor for each matrix of each expert, or all of a kind in one tensor. Both are read; what
transformers writes by default is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from msgspec import Struct
from torch import Tensor

from llamarl.families.family import ParameterSpec
from llamarl.layout.boxes import Box, flat_index, whole
from llamarl.model.safetensors_file import TensorSpan
from llamarl.model.tensor_io import read_tensor

Sizes = dict[str, tuple[int, ...]]  # the tensors of a file


class StackedSpan(Struct, frozen=True):
    """A parameter whose matrices are tensors of their own: one for each index of its leading dimensions, in order."""

    parts: tuple[TensorSpan, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Type of the first matrix; that of the others may differ."""
        return self.parts[0].dtype

    @property
    def dtypes(self) -> set[str]:
        return {part.dtype for part in self.parts}

    def read(self, out: Tensor, box: Box | None = None) -> None:
        """Reads a box of the parameter, or all of it."""
        box = whole(self.shape) if box is None else box
        leading = len(box) - 2
        counts = self.shape[:leading]
        places = product(*(range(*dim) for dim in box[:leading]))
        for at, place in zip(out.flatten(0, leading - 1), places, strict=True):
            read_tensor(self.parts[flat_index(place, counts)], at, box[leading:])


Span = TensorSpan | StackedSpan


def read_span(span: Span, out: Tensor, box: Box | None = None) -> None:
    """Reads a box of a parameter, or all of it, into `out`."""
    if isinstance(span, StackedSpan):
        span.read(out, box)
    else:
        read_tensor(span, out, box)


def tensors_of(span: Span) -> tuple[TensorSpan, ...]:
    """The tensors of files that hold a parameter, in its order."""
    return span.parts if isinstance(span, StackedSpan) else (span,)


def has_layouts(parameter: ParameterSpec) -> bool:
    """Whether files hold a parameter in one of several ways."""
    return bool(parameter.each or parameter.also)


def layouts(parameter: ParameterSpec) -> Iterator[Sizes]:
    """The ways in which files may hold a parameter; first that in which it is written."""
    if parameter.each:
        yield {name: parameter.shape[-2:] for name in _names_of_each(parameter)}
    joined = (parameter.shape[0], prod(parameter.shape[1:-1]), parameter.shape[-1])
    for name in filter(None, (parameter.stored or parameter.name, parameter.also)):
        yield {name: joined if parameter.is_expert else parameter.shape}


def found_layout(parameter: ParameterSpec, names: Mapping[str, object]) -> Sizes:
    """The way in which a file with these names holds a parameter; the first one, if it does not."""
    ways = list(layouts(parameter))
    return next((way for way in ways if next(iter(way)) in names), ways[0])


def span_of(parameter: ParameterSpec, spans: Mapping[str, TensorSpan], way: Sizes) -> Span:
    """The place of a parameter in files that hold it in this way."""
    parts = tuple(spans[name] for name in way)
    if len(parts) > 1:
        return StackedSpan(parts, parameter.shape)
    (one,) = parts
    return TensorSpan(one.path, one.dtype, parameter.shape, one.offset, one.num_bytes)


def as_written(parameter: ParameterSpec, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that a file holds of a parameter."""
    way = next(layouts(parameter))
    matrices = tensor.flatten(0, -3) if parameter.each else (tensor,)
    return {name: matrix.reshape(size) for (name, size), matrix in zip(way.items(), matrices, strict=True)}


def _names_of_each(parameter: ParameterSpec) -> Iterator[str]:
    for expert in range(parameter.shape[0]):
        yield from (name.format(expert=expert) for name in parameter.each)
