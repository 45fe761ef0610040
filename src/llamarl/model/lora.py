"""LoRA: two small matrices beside a frozen layer, y = W x + scale B (A x), for trainer and generator.

Layers keep their place and their parameter names; adapters are parameters of their own, named as PEFT names them. The trainer
changes the class of a layer (`add_adapters`). The generator has joined layers whose products are computed in other ways, so
the adapters are put around those products (`serve_adapters`), or merged into the weights (`merge_adapters`). Both sides
compute the adapters' product with the same function, in the precision of the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llamarl.config.lora import LoraConfig
from llamarl.families.adapters import LORA_A, LORA_B, adapted_layers, adapter_names, adapter_parameters
from llamarl.families.family import ParameterSpec
from llamarl.model.linear import JoinedLinear, Product, ReplacedLinear
from llamarl.model.ops import Stream, fused, silu_times
from llamarl.model.transformer import MLP, Attention, Transformer, layers_of

if TYPE_CHECKING:
    from llamarl.model.lora_kernels import AdapterTiles

OUTPUTS = ("attention_out", "mlp_out")  # layers whose product is added to the residual stream
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
        self.products: list[AdaptedProduct] = []  # of the generator
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
        layer = _layer_of(model, weight)
        _put(layer, model, weight, lora, make)
        layer.adapters = adapters  # type: ignore[assignment]
        if mixin is WithAdapter and weight.kind in OUTPUTS:
            layer.beside = partial(add_delta, layer)  # type: ignore[assignment]
        else:
            layer.__class__ = adapted_class(type(layer), mixin)
    return adapters


def _layer_of(model: Transformer, weight: ParameterSpec) -> nn.Linear:
    return cast(nn.Linear, model.get_submodule(weight.module))


def _put(layer: nn.Linear, model: Transformer, weight: ParameterSpec, lora: LoraConfig, make: MakeParameter) -> None:
    specs = adapter_parameters(model.shape, lora)
    name_a, name_b = adapter_names(weight)
    setattr(layer, LORA_A, AdapterWeight(make(specs[name_a])))
    setattr(layer, LORA_B, AdapterWeight(make(specs[name_b])))


# The generator's products


class Part(NamedTuple):
    """One layer of a joined product: the name of its weight, and its rows of the joined weight."""

    name: str
    rows: slice

    @property
    def size(self) -> int:
        return int(self.rows.stop - self.rows.start)


class AdaptedProduct:
    """The product of one layer, or of several that read the same input, with adapters beside it. All A are one matrix, one
    behind another, and so are all B. On a GPU they take two launches (`lora_kernels.py`)."""

    def __init__(self, base: Product, a: Tensor, b: Tensor, parts: Sequence[Part], adapters: Adapters) -> None:
        self._base, self._a, self._b, self._parts, self._adapters = base, a, b, parts, adapters
        self._rank, self._scale = adapters.lora.rank, adapters.lora.scale
        self._tiles = self._make_tiles() if a.is_cuda else None

    def _make_tiles(self) -> AdapterTiles:
        from llamarl.model.lora_kernels import tiles_of

        return tiles_of([part.rows for part in self._parts])

    def __call__(self, x: Any) -> Any:
        if not self._adapters.on:
            return self._base(x)
        if self._has_kernels(x):
            out = self._base(x)
            return self._add(out, self._inner_of(x))
        out = self._base(x)
        for part, h, b in zip(self._parts, self._inner(x), self._all_b(), strict=True):
            out[..., part.rows] += F.linear(h, b)
        return out

    def beside(self, total: Tensor, x: Any, add_base: AddBase) -> Stream:
        """Adds the adapters' product of a single layer to the residual stream, and the base's."""
        if not self._adapters.on:
            return add_base(total)
        if self._has_kernels(x):
            out = add_base(total)
            self._add(total, self._inner_of(x))  # the sum is made in place
            return out
        return add_base(total + F.linear(self._inner(x)[0], self._b))

    def _has_kernels(self, x: Any) -> bool:
        return self._tiles is not None and fused(x[0] if isinstance(x, tuple) else x)

    def _inner_of(self, x: Any) -> Tensor:
        """A's product; to be made right behind the base's, from the same input."""
        from llamarl.model.lora_kernels import shrink

        return shrink(x, self._a, early=True)

    def _add(self, out: Tensor, inner: Tensor) -> Tensor:
        """Adds B's product to `out`, in place."""
        from llamarl.model.lora_kernels import expand_add

        assert self._tiles is not None
        expand_add(out, inner, self._b, self._tiles, self._scale, early=True)
        return out

    def _inner(self, x: Any) -> Sequence[Tensor]:
        return torch.split(F.linear(_plain_input(x, self._a.dtype), self._a) * self._scale, self._rank, dim=-1)

    def _all_b(self) -> Sequence[Tensor]:
        return torch.split(self._b, [part.size for part in self._parts])

    def applied(self) -> Iterator[Applied]:
        for part, a, b in zip(self._parts, torch.split(self._a, self._rank), self._all_b(), strict=True):
            yield Applied(part.name, a, b, self._scale)


class Pending(NamedTuple):
    """The base's product of gate and up, and A's, not yet added."""

    out: Tensor
    inner: Tensor


class AdaptedGate(AdaptedProduct):
    """The product of gate and up. On a GPU, `activate` adds the adapters' product on the way."""

    def __call__(self, x: Any) -> Any:
        if not (self._adapters.on and len(self._parts) == 2 and self._has_kernels(x)):
            return super().__call__(x)
        out = self._base(x)
        return Pending(out, self._inner_of(x))

    def activate(self, gate_up: Tensor | Pending) -> Tensor:
        """silu(gate) * up"""
        if isinstance(gate_up, Tensor):
            return silu_times(gate_up)
        from llamarl.model.lora_kernels import expand_gated

        gate_first = self._parts[0].rows.start == 0
        return expand_gated(gate_up.out, gate_up.inner, self._b, gate_first, self._scale, early=True)


def _plain_input(x: Any, dtype: torch.dtype) -> Tensor:
    """The input of a product; quantized rows become the numbers that they stand for."""
    if not isinstance(x, tuple):
        return cast(Tensor, x)
    values, scales = x
    return cast(Tensor, (values.float() * scales.view(*values.shape[:-1], 1)).to(dtype))


BoxShape = Callable[[ParameterSpec], tuple[int, ...]]  # the shape of a rank's part of a parameter


def serve_adapters(model: Transformer, lora: LoraConfig, shape_of: BoxShape) -> Adapters:
    """Puts zeroed adapters around the products of a generator's model, which is joined, and quantized and split over ranks if
    it is to be so. The parameters are views of what the products read."""
    adapters = model.adapters = Adapters(lora, model.lm_head.weight.dtype)
    weights = {weight.module: weight for weight in adapted_layers(model.shape, lora)}
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, Attention | MLP):
            continue
        inputs, output = layers_of(module)
        joined = [weights[f"{prefix}.{name}"] for name in inputs if f"{prefix}.{name}" in weights]
        if joined:
            assert module.fused is not None, "fuse the model first"
            base = getattr(module.fused, "__self__", module.fused)  # the product with its scales, not `unscaled`
            gated = isinstance(module, MLP) and module.activate is silu_times
            kind = AdaptedGate if gated else AdaptedProduct
            product = _adapt(model, base, joined, _rows_of(module, inputs, prefix), shape_of, adapters, kind)
            module.fused = product
            if isinstance(module, MLP) and isinstance(product, AdaptedGate):
                module.activate = product.activate
        if f"{prefix}.{output}" in weights:
            _adapt_output(model, module, weights[f"{prefix}.{output}"], shape_of, adapters)
    return adapters


def _rows_of(module: Attention | MLP, inputs: Sequence[str], prefix: str) -> dict[str, slice]:
    """Rows of each layer in the output of the joined product."""
    found, start = dict[str, slice](), 0
    for name in inputs:
        end = start + len(getattr(module, name).weight)
        found[f"{prefix}.{name}"], start = slice(start, end), end
    return found


def _adapt(
    model: Transformer,
    base: Product,
    layers: Sequence[ParameterSpec],
    rows: dict[str, slice],
    shape_of: BoxShape,
    adapters: Adapters,
    kind: type[AdaptedProduct] = AdaptedProduct,
) -> AdaptedProduct:
    specs = adapter_parameters(model.shape, adapters.lora)
    like, parts = model.lm_head.weight, list[Part]()
    names = [adapter_names(layer) for layer in layers]
    rank, inputs = shape_of(specs[names[0][0]])
    a = torch.zeros(rank * len(layers), inputs, dtype=like.dtype, device=like.device)
    sizes = [shape_of(specs[name_b])[0] for _, name_b in names]
    whole_b = torch.zeros(sum(sizes), rank, dtype=like.dtype, device=like.device)
    for number, (weight, b) in enumerate(zip(layers, torch.split(whole_b, sizes), strict=True)):
        layer, start = _layer_of(model, weight), rows[weight.module].start
        setattr(layer, LORA_A, AdapterWeight(_frozen(a[number * rank : (number + 1) * rank])))
        setattr(layer, LORA_B, AdapterWeight(_frozen(b)))
        parts.append(Part(weight.name, slice(start, start + len(b))))
    product = kind(base, a, whole_b, parts, adapters)
    adapters.products.append(product)
    return product


def _frozen(memory: Tensor) -> nn.Parameter:
    return nn.Parameter(memory, requires_grad=False)


def _adapt_output(
    model: Transformer, module: Attention | MLP, weight: ParameterSpec, shape_of: BoxShape, adapters: Adapters
) -> None:
    layer = getattr(module, layers_of(module)[1])
    rows = {weight.module: slice(0, None)}
    if isinstance(layer, ReplacedLinear) and not hasattr(layer, "terms"):  # it sums over ranks, adapters and all
        layer.product = _adapt(model, layer.product, [weight], rows, shape_of, adapters)
    else:
        layer.beside = _adapt(model, layer, [weight], rows, shape_of, adapters).beside


# Merged


class MergedWeight:
    """A weight of the generator with its adapters merged into it, in memory of its own, beside that of the base."""

    def __init__(self, name: str, base: Tensor, layer: nn.Linear, scale: float) -> None:
        self.name, self.scale = name, scale
        self._base, self._target = base, layer.weight.detach()
        self.a, self.b = (cast(AdapterWeight, getattr(layer, one)).weight.detach() for one in (LORA_A, LORA_B))

    @torch.no_grad()
    def refresh(self) -> None:
        """Merges the adapters, always into the base's own numbers, so that no error adds up over the versions."""
        merged = torch.addmm(self._base.float(), self.b.float(), self.a.float(), alpha=self.scale)
        self._target.copy_(merged)

    @torch.no_grad()
    def restore(self) -> None:
        self._target.copy_(self._base)


def merge_adapters(model: Transformer, lora: LoraConfig, shape_of: BoxShape) -> Adapters:
    """Gives the layers of a generator's model zeroed adapters, which `refresh` merges into the weights."""
    adapters = model.adapters = Adapters(lora, model.lm_head.weight.dtype)
    like, layers = model.lm_head.weight, adapted_layers(model.shape, lora)

    def make(spec: ParameterSpec) -> nn.Parameter:
        return _frozen(torch.zeros(shape_of(spec), dtype=like.dtype, device=like.device))

    base = {weight.name: _layer_of(model, weight).weight.detach() for weight in layers}
    for part in list(model.modules()):
        if isinstance(part, Attention | MLP):
            _own_weights(part)
    for weight in layers:
        layer = _layer_of(model, weight)
        _put(layer, model, weight, lora, make)
        adapters.merged.append(MergedWeight(weight.name, base[weight.name], layer, lora.scale))
    return adapters


def _own_weights(part: Attention | MLP) -> None:
    """Gives the products of a fused part copies of their weights, which may be written."""
    assert isinstance(part.fused, JoinedLinear), "fuse the model first"
    part.fused = JoinedLinear(part.fused.weight.clone(), part.fused.bias)
    inputs, output = layers_of(part)
    sizes = [len(getattr(part, name).weight) for name in inputs]
    for name, rows in zip(inputs, torch.split(part.fused.weight, sizes), strict=True):
        getattr(part, name).weight = _frozen(rows)
    layer = getattr(part, output)
    layer.weight = _frozen(layer.weight.detach().clone())
    if isinstance(layer, ReplacedLinear):
        layer.product = JoinedLinear(layer.weight, None)
