"""How PEFT's files hold adapters: those of layers as they are, and those of experts as PEFT adapts parameters of a module.

A of all experts are one matrix, one below another [experts * rank, in]. B are one, too, in which the experts come last
[out, rank * experts]. Of several parameters of a module, the first is adapted first, and each next one around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from math import prod
from types import MappingProxyType

import torch
from msgspec import Struct
from torch import Tensor

from llamarl.config.lora import LoraConfig
from llamarl.families.adapters import LORA_A, LORA_B, adapted_layers, adapter_names, adapter_parameters
from llamarl.families.family import ParameterSpec
from llamarl.layout.boxes import Box, shape_of, whole
from llamarl.model.safetensors_file import TensorSpan
from llamarl.model.tensor_io import read_tensor
from llamarl.model_spec import ModelSpec

_WRAPPED = ".base_layer"  # what a module with adapters calls the one that it is around


class StoredAdapter(Struct, frozen=True):
    """An adapter in PEFT's files: its name there, without the prefix of all names, and how it lies there."""

    name: str
    spec: ParameterSpec
    experts_last: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        sizes = self._sizes
        if not self.spec.by_expert:
            return sizes
        return (prod(sizes[:-2]), prod(sizes[-2:])) if self.experts_last else (prod(sizes[:-1]), sizes[-1])

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The adapter's dimensions in the order of the file."""
        first, *rest = self.spec.shape
        return (*rest, first) if self.experts_last else self.spec.shape

    def written(self, tensor: Tensor) -> Tensor:
        """The tensor of the file."""
        return (tensor.movedim(0, -1) if self.experts_last else tensor).reshape(self.shape)

    def read(self, span: TensorSpan, out: Tensor, box: Box | None = None) -> None:
        """Reads a box of the adapter, or all of it."""
        box = whole(self.spec.shape) if box is None else box
        span = TensorSpan(span.path, span.dtype, self._sizes, span.offset, span.num_bytes)
        if not self.experts_last:
            read_tensor(span, out, box)
            return
        in_file = (*box[1:], box[0])
        part = torch.empty(shape_of(in_file), dtype=out.dtype, device=out.device)
        read_tensor(span, part, in_file)
        out.copy_(part.movedim(-1, 0))


@lru_cache(maxsize=64)
def stored_adapters(shape: ModelSpec, lora: LoraConfig) -> Mapping[str, StoredAdapter]:
    """Maps the name of every adapter to what files hold of it."""
    specs = adapter_parameters(shape, lora)
    layers = adapted_layers(shape, lora)
    found = {}
    for weight in layers:
        for name in () if weight.is_expert else adapter_names(weight):
            found[name] = StoredAdapter(name, specs[name])
    for _, weights in groupby((one for one in layers if one.is_expert), lambda weight: weight.module):
        for weight, module in _around(list(weights)):
            name_a, name_b = adapter_names(weight)
            found[name_a] = StoredAdapter(f"{module}.{LORA_A}.weight", specs[name_a])
            found[name_b] = StoredAdapter(f"{module}.{LORA_B}.weight", specs[name_b], experts_last=True)
    return MappingProxyType({name: found[name] for name in specs})


def adapted_parameters(shape: ModelSpec, lora: LoraConfig) -> list[str]:
    """`target_parameters` of PEFT's config: names of the experts' matrices, as they end in every layer."""
    names = {_in_transformers(one) for one in adapted_layers(shape, lora) if one.is_expert}
    return sorted({".".join(name.split(".")[-3:]) for name in names})


def _around(weights: list[ParameterSpec]) -> Iterator[tuple[ParameterSpec, str]]:
    """The parameters of a module, each with the name of the module that has its adapters."""
    for depth, weight in enumerate(reversed(weights)):
        yield weight, _in_transformers(weight).rpartition(".")[0] + _WRAPPED * depth


def _in_transformers(weight: ParameterSpec) -> str:
    """The name of a parameter in the model that transformers makes."""
    return weight.also or weight.name
