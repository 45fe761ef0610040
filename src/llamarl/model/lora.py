"""LoRA: two small matrices beside a frozen layer, y = W x + scale B (A x), for trainer and generator.

Layers keep their place and their parameter names; adapters are parameters of their own, named as PEFT names them. The trainer
changes the class of a layer (`add_adapters`). The generator has joined layers whose products are computed in other ways, so
the adapters are put around those products, or merged into the weights (`lora_serving.py`). Both sides compute the adapters'
product with the same function, in the precision of the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llamarl.config.lora import LoraConfig
from llamarl.families.adapters import LORA_A, LORA_B, adapted_layers, adapter_names, adapter_parameters
from llamarl.families.family import ParameterSpec
from llamarl.model.expert_products import AdapterPair, ExpertAdapters
from llamarl.model.experts import Experts
from llamarl.model.ops import Stream
from llamarl.model.spread import local_part
from llamarl.model.transformer import Transformer

if TYPE_CHECKING:
    from llamarl.model.lora_serving import AdaptedProduct, MergedWeight, ServedExperts

OUTPUTS = ("attention_out", "mlp_out")  # layers whose product is added to the residual stream
EXPERT_MATRICES = ("gate_up_proj", "down_proj")
MakeParameter = Callable[[ParameterSpec], nn.Parameter]
AddBase = Callable[[Tensor], Stream]  # adds the base's product to the residual stream


def low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * B (A x). The factor is applied in between, where there are fewest numbers."""
    return F.linear(F.linear(x, a) * scale, b)


class AdapterWeight(nn.Module):
    """A or B of a layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Applied(NamedTuple):
    """The adapters of one layer as its product reads them."""

    weight: str  # name of the layer's own weight
    a: Tensor
    b: Tensor
    scale: float


class Adapters:
    """All adapters of one model. They can be switched off, which leaves the base."""

    def __init__(self, lora: LoraConfig, dtype: torch.dtype) -> None:
        self.lora, self.dtype, self.on = lora, dtype, True
        self.products: list[AdaptedProduct | ServedExperts] = []  # of the generator
        self.merged: list[MergedWeight] = []

    @contextmanager
    def off(self) -> Iterator[None]:
        """Computes with the base alone, until the end of the block."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        self.on = on
        for one in self.merged:
            one.refresh() if on else one.restore()

    def refresh(self) -> None:
        """To be called when new adapters have arrived."""
        for one in self.merged:
            one.refresh()

    def applied(self) -> Iterator[Applied]:
        """The adapters as the generator's products read them, layer by layer."""
        for product in self.products:
            yield from product.applied()
        for one in self.merged:
            yield Applied(one.name, one.a, one.b, one.scale)


# The trainer's layers


class WithAdapter(nn.Linear):
    """A layer with adapters beside it. Combined with the layer's own class, which computes the product with the base."""

    lora_A: AdapterWeight
    lora_B: AdapterWeight
    adapters: Adapters

    def forward(self, x: Any) -> Tensor:
        out: Tensor = super().forward(x)
        return out + self.delta(x) if self.adapters.on else out

    def delta(self, x: Tensor) -> Tensor:
        return delta_of(self, x)


def delta_of(layer: Any, x: Tensor) -> Tensor:
    """The adapters' product of a trainer's layer. They are rounded as the generator receives them, and so is their input,
    where the layer says how (`adapter_input`)."""
    if (seen := getattr(layer, "adapter_input", None)) is not None:
        x = seen(x)
    a, b = (one.weight.to(layer.adapters.dtype).to(x.dtype) for one in (layer.lora_A, layer.lora_B))
    return low_rank(x, a, b, layer.adapters.lora.scale)


def add_delta(layer: Any, total: Tensor, x: Tensor, add_base: AddBase) -> Stream:
    """Adds the adapters' product of a trainer's layer to the residual stream, and the base's."""
    return add_base(total + delta_of(layer, x) if layer.adapters.on else total)


_ADAPTED: dict[tuple[type[nn.Linear], type[WithAdapter]], type[nn.Linear]] = {}


def adapted_class(layer: type[nn.Linear], mixin: type[WithAdapter] = WithAdapter) -> type[nn.Linear]:
    """The class of layers with adapters, for a class of layers."""
    if (layer, mixin) not in _ADAPTED:
        _ADAPTED[layer, mixin] = cast(type[nn.Linear], type(f"Lora{layer.__name__}", (mixin, layer), {}))
    return _ADAPTED[layer, mixin]


def add_adapters(
    model: Transformer, lora: LoraConfig, make: MakeParameter, mixin: type[WithAdapter] = WithAdapter
) -> Adapters:
    """Freezes the model and gives its layers adapters, which `make` makes."""
    model.requires_grad_(False)
    adapters = model.adapters = Adapters(lora, model.lm_head.weight.dtype)
    for weight in adapted_layers(model.shape, lora):
        layer = layer_of(model, weight)
        put_pair(layer, model, weight, lora, make)
        if isinstance(layer, Experts):
            layer.beside = partial(_of_experts, layer, adapters)
            continue
        layer.adapters = adapters  # type: ignore[assignment]
        if mixin is WithAdapter and weight.kind in OUTPUTS:
            layer.beside = partial(add_delta, layer)  # type: ignore[assignment]
        else:
            layer.__class__ = adapted_class(type(layer), mixin)
    return adapters


def _of_experts(experts: Experts, adapters: Adapters, dtype: torch.dtype) -> ExpertAdapters | None:
    """The adapters of a layer's experts, rounded as the generator receives them."""
    if not adapters.on:
        return None
    gate_up, down = (expert_pair(experts, name, adapters.dtype, dtype) for name in EXPERT_MATRICES)
    return ExpertAdapters(gate_up, down, adapters.lora.scale)


def expert_pair(experts: Experts, matrix: str, *types: torch.dtype) -> AdapterPair:
    """A and B of one of the matrices, after these changes of type."""
    found = [local_part(getattr(experts, f"{matrix}_{one}").weight) for one in (LORA_A, LORA_B)]
    for dtype in types:
        found = [one.to(dtype) for one in found]
    return AdapterPair(*found)


def layer_of(model: Transformer, weight: ParameterSpec) -> nn.Linear | Experts:
    return cast(nn.Linear | Experts, model.get_submodule(weight.module))


def weight_of(model: Transformer, weight: ParameterSpec) -> Tensor:
    return model.get_parameter(weight.name).detach()


def put_pair(
    layer: nn.Module, model: Transformer, weight: ParameterSpec, lora: LoraConfig, make: MakeParameter
) -> tuple[nn.Parameter, nn.Parameter]:
    """Gives a layer A and B, under their names."""
    specs = adapter_parameters(model.shape, lora)
    names = adapter_names(weight)
    made = make(specs[names[0]]), make(specs[names[1]])
    for name, one in zip(names, made, strict=True):
        setattr(layer, name.removesuffix(".weight").rpartition(".")[2], AdapterWeight(one))
    return made


def matrices(weight: Tensor) -> Tensor:
    """A matrix, or those of all experts, which may have their outputs in two dimensions: [experts, out, in]."""
    return weight[None] if weight.dim() == 2 else weight.flatten(1, -2)
