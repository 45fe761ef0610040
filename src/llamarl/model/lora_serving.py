"""LoRA in the generator: adapters around the products of a model, which are joined (`serve_adapters`), or merged into its
weights (`merge_adapters`). What the layers of both sides share is in `lora.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llamarl.config.lora import LoraConfig
from llamarl.families.adapters import LORA_A, LORA_B, adapted_layers, adapter_names, adapter_parameters
from llamarl.families.family import ParameterSpec
from llamarl.model.expert_products import ExpertAdapters
from llamarl.model.experts import Experts
from llamarl.model.linear import JoinedLinear, Product, ReplacedLinear
from llamarl.model.lora import (
    EXPERT_MATRICES,
    Adapters,
    AdapterWeight,
    AddBase,
    Applied,
    MakeParameter,
    expert_pair,
    layer_of,
    matrices,
    put_pair,
    weight_of,
)
from llamarl.model.ops import Stream, fused, silu_times
from llamarl.model.transformer import MLP, Attention, Transformer, layers_of

if TYPE_CHECKING:
    from llamarl.model.lora_kernels import AdapterTiles


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


class ServedExperts:
    """The adapters of a layer's experts, as the products with its matrices read them."""

    def __init__(self, experts: Experts, names: Sequence[str], adapters: Adapters) -> None:
        gate_up, down = (expert_pair(experts, matrix) for matrix in EXPERT_MATRICES)
        self._names, self._all = names, ExpertAdapters(gate_up, down, adapters.lora.scale)
        self._adapters = adapters

    def __call__(self, dtype: torch.dtype) -> ExpertAdapters | None:
        return self._all if self._adapters.on else None

    def applied(self) -> Iterator[Applied]:
        for name, pair in zip(self._names, self._all[:2], strict=True):
            yield Applied(name, *pair, self._all.scale)


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
    layers = adapted_layers(model.shape, lora)
    weights = {weight.module: weight for weight in layers if not weight.is_expert}
    _serve_experts(model, [weight for weight in layers if weight.is_expert], shape_of, adapters)
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


def _serve_experts(
    model: Transformer, weights: Sequence[ParameterSpec], shape_of: BoxShape, adapters: Adapters
) -> None:
    for module, both in groupby(weights, lambda weight: weight.module):
        experts, names = cast(Experts, model.get_submodule(module)), list[str]()
        for weight in both:
            put_pair(experts, model, weight, adapters.lora, _zeros(model, shape_of))
            names.append(weight.name)
        experts.beside = served = ServedExperts(experts, names, adapters)
        adapters.products.append(served)


def _zeros(model: Transformer, shape_of: BoxShape) -> MakeParameter:
    """Makes a rank's part of adapters, of zeros, as the model computes."""
    like = model.lm_head.weight
    return lambda spec: _frozen(torch.zeros(shape_of(spec), dtype=like.dtype, device=like.device))


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
        layer, start = layer_of(model, weight), rows[weight.module].start
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


class MergedWeight:
    """A weight of the generator with its adapters merged into it, in memory of its own, beside that of the base."""

    def __init__(self, name: str, base: Tensor, target: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        self.name, self.scale = name, scale
        self._base, self._target = base, target
        self.a, self.b = a.detach(), b.detach()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merges the adapters, always into the base's own numbers, so that no error adds up over the versions."""
        for base, target, a, b in zip(*map(matrices, (self._base, self._target, self.a, self.b)), strict=True):
            target.copy_(torch.addmm(base.float(), b.float(), a.float(), alpha=self.scale))

    @torch.no_grad()
    def restore(self) -> None:
        self._target.copy_(self._base)


def merge_adapters(model: Transformer, lora: LoraConfig, shape_of: BoxShape) -> Adapters:
    """Gives the layers of a generator's model zeroed adapters, which `refresh` merges into the weights."""
    adapters = model.adapters = Adapters(lora, model.lm_head.weight.dtype)
    layers = adapted_layers(model.shape, lora)
    base = {weight.name: weight_of(model, weight) for weight in layers}
    of_experts = {weight.module for weight in layers if weight.is_expert}
    for name, part in list(model.named_modules()):
        if isinstance(part, Attention | MLP):
            _own_weights(part)
        elif name in of_experts:
            for matrix in EXPERT_MATRICES:
                setattr(part, matrix, _frozen(getattr(part, matrix).detach().clone()))
    for weight in layers:
        a, b = put_pair(layer_of(model, weight), model, weight, lora, _zeros(model, shape_of))
        target = weight_of(model, weight)
        adapters.merged.append(MergedWeight(weight.name, base[weight.name], target, a, b, lora.scale))
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
