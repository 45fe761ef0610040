"""The frozen base of a model with adapters: all of its parameters in one piece of memory, which several processes can map.

Matrices that read the same input lie one behind another (q, k, v; gate, up), so that a generator joins them without a copy.
In fp8 the matrices of the layers are narrow, with a scale for every row; trainer and generator compute from the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn

from llamarl.families.family import ParameterSpec
from llamarl.families.parameters import parameters
from llamarl.layout.model import SCALE
from llamarl.model.checkpoint import Checkpoint, meta_model
from llamarl.model.quantize import FP8, quantize_rows
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec

BasePrecision = Literal["wide", "fp8"]
_ALIGNED = 256  # bytes; as torch's own memory on a GPU


class BaseTensor(NamedTuple):
    """Where a parameter, or the scales of one, lies in the memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        num_bytes = prod(self.shape) * self.dtype.itemsize
        return memory[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


class BaseLayout(Struct, frozen=True, dict=True):
    """How the base of a model lies in memory. `dtype` is that of all that is not narrow."""

    spec: ModelSpec
    dtype: torch.dtype
    precision: BasePrecision = "wide"

    @cached_property
    def tensors(self) -> Mapping[str, BaseTensor]:
        """Maps each parameter, and the scales of each narrow one (`..._scale`), to its place."""
        found, at = dict[str, BaseTensor](), 0
        for neighbors in self._pieces():
            at = -(-at // _ALIGNED) * _ALIGNED
            for name, shape, dtype in neighbors:
                found[name] = BaseTensor(at, shape, dtype)
                at += prod(shape) * dtype.itemsize
        return found

    @property
    def num_bytes(self) -> int:
        last = list(self.tensors.values())[-1]
        return last.offset + prod(last.shape) * last.dtype.itemsize

    @property
    def digest(self) -> str:
        """Equal for equal layouts of equal models."""
        text = repr([(name, *one) for name, one in self.tensors.items()])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _pieces(self) -> Iterator[list[tuple[str, tuple[int, ...], torch.dtype]]]:
        """Tensors that lie one behind another without a gap."""
        for alike in _neighbors(parameters(self.spec).values()):
            narrow = self.is_narrow(alike[0])
            yield [(one.name, one.shape, FP8 if narrow else self.dtype) for one in alike]
            if narrow:
                yield [(one.name + SCALE, (one.shape[0], 1), torch.float32) for one in alike]

    def is_narrow(self, parameter: ParameterSpec) -> bool:
        return self.precision == "fp8" and parameter.is_product


def _neighbors(table: Iterable[ParameterSpec]) -> Iterator[list[ParameterSpec]]:
    """Parameters by their use, part by part of the model: those of one use in one part read the same input."""
    for _, part in groupby(table, key=_part):
        alike: dict[str, list[ParameterSpec]] = {}
        for one in part:
            alike.setdefault(one.kind, []).append(one)
        yield from alike.values()


def _part(parameter: ParameterSpec) -> str:
    return parameter.module.rpartition(".")[0]


class Base(NamedTuple):
    """A base in memory, which is never written again."""

    layout: BaseLayout
    memory: Tensor  # bytes

    def model(self) -> Transformer:
        """A model whose parameters are this memory. Those that are narrow have their scales as buffers."""
        model, specs = meta_model(self.layout.spec), parameters(self.layout.spec)
        for name, place in self.layout.tensors.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            if name in specs:
                setattr(owner, name.rpartition(".")[2], nn.Parameter(place.view(self.memory), requires_grad=False))
            else:
                owner.register_buffer(name.rpartition(".")[2], place.view(self.memory), persistent=False)
        if model.shape.tied_head:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model


def read_base(checkpoint: Checkpoint, layout: BaseLayout, memory: Tensor) -> None:
    """Reads the files straight into the memory. Of narrow matrices, the wide ones of one layer are held at a time."""
    specs = parameters(layout.spec)
    checkpoint.fill(
        {name: layout.tensors[name].view(memory) for name, one in specs.items() if not layout.is_narrow(one)}
    )
    narrow = [one for one in specs.values() if layout.is_narrow(one)]
    for _, alike in groupby(narrow, key=_part):
        _read_narrow(checkpoint, layout, list(alike), memory)


def _read_narrow(checkpoint: Checkpoint, layout: BaseLayout, alike: list[ParameterSpec], memory: Tensor) -> None:
    wide = {one.name: torch.empty(one.shape, dtype=layout.dtype, device=memory.device) for one in alike}
    checkpoint.fill(wide)
    for name, tensor in wide.items():
        values, scales = quantize_rows(tensor, FP8)
        layout.tensors[name].view(memory).copy_(values)
        layout.tensors[name + SCALE].view(memory).copy_(scales[:, None])
