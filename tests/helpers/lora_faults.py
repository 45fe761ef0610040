"""The faults by which adapters have silently not reached the rollouts elsewhere, planted into a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.executors.executor import Executor
from llamarl.model.lora_serving import AdaptedProduct, ServedExperts
from llamarl.model.transformer import MLP

Fault = Callable[[Any], None]  # changes a built generator


def _products(generator: Any) -> list[Any]:
    products: list[Any] = generator._decoder.model.adapters.products
    return products


def _mlp_product(generator: Any) -> AdaptedProduct:
    """Of gate and up."""
    mlp = next(module for module in generator._decoder.model.modules() if isinstance(module, MLP))
    assert isinstance(mlp.fused, AdaptedProduct)
    return mlp.fused


def not_applied(generator: Any) -> None:
    """They arrive, and no product reads them."""
    for module in generator._decoder.model.modules():
        if isinstance(getattr(module, "fused", None), AdaptedProduct):
            module.fused = module.fused._base
        if getattr(module, "beside", None) is not None:
            module.beside = None


def one_matrix_missing(generator: Any) -> None:
    """One of them never arrives where it is read."""
    product = _products(generator)[0]
    missing = product._parts[0].size
    load = generator._weights.load

    def without_one(version: int) -> int:
        num_bytes: int = load(version)
        product._b[:missing].zero_()
        return num_bytes

    generator._weights.load = without_one


def wrong_scale(generator: Any) -> None:
    for product in _products(generator):
        product._scale /= 2


def wrong_order(generator: Any) -> None:
    """Gate's adapters are added to up, and the other way around."""
    product = _mlp_product(generator)
    gate, up = product._parts
    product._parts = [gate._replace(rows=up.rows), up._replace(rows=gate.rows)]
    if product._tiles is not None:
        product._tiles = product._make_tiles()


def aliased(generator: Any) -> None:
    """Two matrices share one buffer."""
    product, load = _mlp_product(generator), generator._weights.load
    size = product._parts[0].size

    def over_the_first(version: int) -> int:
        num_bytes: int = load(version)
        product._b[size:].copy_(product._b[:size])
        return num_bytes

    generator._weights.load = over_the_first


def stale(generator: Any) -> None:
    """Products read what arrived one version ago."""
    held = [shard.tensor for shard in generator._weights._plan.shards.values()]
    before, load = [tensor.clone() for tensor in held], generator._weights.load

    def late(version: int) -> int:
        num_bytes: int = load(version)
        for tensor, old in zip(held, before, strict=True):
            new = tensor.clone()
            tensor.copy_(old)
            old.copy_(new)
        return num_bytes

    generator._weights.load = late


def _change_experts(generator: Any, change: Callable[[ServedExperts], None]) -> None:
    """Changes what the experts' products read, in every layer."""
    for product in _products(generator):
        if isinstance(product, ServedExperts):
            change(product)


def experts_wrong_scale(generator: Any) -> None:
    def halve(served: ServedExperts) -> None:
        served._all = served._all._replace(scale=served._all.scale / 2)

    _change_experts(generator, halve)


def experts_without_down(generator: Any) -> None:
    """Those of one matrix are not computed."""

    def drop(served: ServedExperts) -> None:
        down = served._all.down
        served._all = served._all._replace(down=down._replace(b_ENR=down.b_ENR.new_zeros(down.b_ENR.shape)))

    _change_experts(generator, drop)


def experts_off_by_one(generator: Any) -> None:
    """Every expert has the adapters of the one before it: the right numbers, read in the wrong place."""

    def shift(served: ServedExperts) -> None:
        pairs = [type(pair)(*(one.roll(1, 0) for one in pair)) for pair in served._all[:2]]
        load = generator._weights.load

        def shifted(version: int) -> int:
            num_bytes: int = load(version)
            for pair, own in zip(pairs, held, strict=True):
                for one, source in zip(pair, own, strict=True):
                    one.copy_(source.roll(1, 0))
            return num_bytes

        held, served._all = served._all[:2], served._all._replace(gate_up=pairs[0], down=pairs[1])
        generator._weights.load = shifted

    _change_experts(generator, shift)


def experts_gate_for_up(generator: Any) -> None:
    """Gate's adapters are added to up, and the other way around."""

    def swap(served: ServedExperts) -> None:
        source, load = served._all.gate_up, generator._weights.load
        swapped = source.b_ENR.clone()

        def load_swapped(version: int) -> int:
            num_bytes: int = load(version)
            swapped.copy_(source.b_ENR.flip(1))
            return num_bytes

        served._all = served._all._replace(gate_up=source._replace(b_ENR=swapped))
        generator._weights.load = load_swapped

    _change_experts(generator, swap)


OF_EXPERTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        not_applied,
        experts_wrong_scale,
        experts_without_down,
        experts_off_by_one,
        experts_gate_for_up,
        stale,
    )
}
FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (not_applied, one_matrix_missing, wrong_scale, wrong_order, aliased, stale)
}
SEEN_BY_HASH = {"one_matrix_missing", "wrong_scale", "aliased", "stale"}  # the others read the right numbers


class Planted:
    """A builder whose generator has a fault; `hashed=False`: and tells no hash, so that only the probe can notice."""

    def __init__(self, fault: Fault | None, *, hashed: bool) -> None:
        self._fault, self._hashed = fault, hashed

    def __call__(self, context: BuildContext) -> Executor:
        generator: Any = build_generator(context)
        if self._fault is not None:
            self._fault(generator)
        if not self._hashed:
            generator._adapters.digest = lambda: ""
        found: Executor = generator
        return found
