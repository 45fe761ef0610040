"""The table of LoRA adapters of a model, derived from the table of its family.

A layer with weight W [out, in] has two adapters: A [rank, in] and B [out, rank]. Tensor parallelism cuts them as it cuts the
layer: where W is split by rows, A is whole and B is split by rows; where W is split by columns, A is split by columns and B
is whole, and the adapters' product is part of the sum over ranks. Names are PEFT's, without its prefix.

Every expert has adapters of its own: A [experts, rank, in] and B [experts, ..., rank]. They are cut as its matrices are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

from llamarl.config.lora import LoraConfig
from llamarl.errors import ConfigError
from llamarl.families.family import COLUMNS, ROWS, ParameterSpec
from llamarl.families.parameters import family_of, layer_parameters, parameters
from llamarl.model_spec import ModelSpec

LORA_A, LORA_B = "lora_A", "lora_B"
_KINDS = {"all": ("",), "attention": ("attention",), "mlp": ("mlp", "expert")}  # how kinds of layers begin


@lru_cache(maxsize=64)
def adapter_parameters(spec: ModelSpec, lora: LoraConfig) -> Mapping[str, ParameterSpec]:
    """Maps the name of every adapter to its row, A before B, in the model's order; empty without adapters."""
    found = {one.name: one for layer in adapted_layers(spec, lora) for one in _adapters_of(layer, lora.rank)}
    return MappingProxyType(found)


def trained_parameters(spec: ModelSpec, lora: LoraConfig) -> Mapping[str, ParameterSpec]:
    """The parameters that are trained, published and saved: the adapters, or all of the model's if there are none."""
    return adapter_parameters(spec, lora) if lora else parameters(spec)


def adapted_layers(spec: ModelSpec, lora: LoraConfig) -> list[ParameterSpec]:
    """Weights of the layers that have adapters. ConfigError if the model has no layer of a given name."""
    products = [one for one in parameters(spec).values() if _can_be_adapted(one)]
    if not lora:
        return []
    if isinstance(lora.targets, str):
        prefixes = _KINDS[lora.targets]
        found = [one for one in products if one.kind.startswith(prefixes)]
    else:
        names = layer_names(spec)
        if unknown := [name for name in lora.targets if name not in names]:
            raise ConfigError(f"model.lora.targets: no layer is named '{unknown[0]}'; known: {', '.join(names)}")
        found = [one for one in products if layer_name(one) in lora.targets]
    _refuse_joined(spec, found)
    return found


def _can_be_adapted(weight: ParameterSpec) -> bool:
    return weight.is_product or weight.is_expert


def _refuse_joined(spec: ModelSpec, layers: list[ParameterSpec]) -> None:
    """PEFT knows the layers that files hold, and one adapter of a joined one is not three of its parts."""
    if joined := next((one for one in layers if one.stored and not one.is_expert), None):
        whole = joined.stored.split(".")[-2]
        single = [layer_name(one) for one in family_of(spec).layer(spec) if one.is_product and not one.stored]
        raise ConfigError(
            f"model.lora.targets: files of {spec.family} hold {layer_name(joined)} as a part of {whole}, which adapters of "
            f"single layers cannot stand for; choose among: {', '.join(single)}"
        )


def layer_names(spec: ModelSpec) -> list[str]:
    """Short names of the layers that can have adapters, such as `q_proj`."""
    rows = [row for layer in range(spec.num_layers) for row in layer_parameters(spec, layer)]
    return list(dict.fromkeys(layer_name(one) for one in rows if _can_be_adapted(one)))


def layer_name(weight: ParameterSpec) -> str:
    """Its short name; that of an expert's matrix is `experts`."""
    return weight.module.rpartition(".")[2]


def adapter_names(weight: ParameterSpec) -> tuple[str, str]:
    """Names of A and B of a layer."""
    if weight.is_expert:
        return f"{weight.name}_{LORA_A}.weight", f"{weight.name}_{LORA_B}.weight"
    return f"{weight.module}.{LORA_A}.weight", f"{weight.module}.{LORA_B}.weight"


def _adapters_of(weight: ParameterSpec, rank: int) -> Iterator[ParameterSpec]:
    name_a, name_b = adapter_names(weight)
    if weight.is_expert:
        experts, inner_in = weight.shape[0], weight.split == len(weight.shape) - 1
        yield ParameterSpec(name_a, (experts, rank, weight.shape[-1]), "expert_adapter", 2 if inner_in else None)
        yield ParameterSpec(name_b, (*weight.shape[:-1], rank), "expert_adapter", None if inner_in else weight.split)
        return
    outputs, inputs = weight.shape
    split_a, split_b = (COLUMNS, None) if weight.split == COLUMNS else (None, ROWS)
    yield ParameterSpec(name_a, (rank, inputs), "adapter", split_a, weight.unit)
    yield ParameterSpec(name_b, (outputs, rank), "adapter", split_b, weight.unit, weight.copied and split_b == ROWS)


def active_adapter_parameters(spec: ModelSpec, lora: LoraConfig) -> float:
    """Number of weights of adapters that each token is multiplied with: of experts, those of a few."""
    found = adapter_parameters(spec, lora).values()
    of_experts = sum(one.size for one in found if one.by_expert)
    unused = of_experts * (1 - spec.experts_per_token / spec.experts) if of_experts else 0.0
    return num_adapter_parameters(spec, lora) - unused


@lru_cache(maxsize=64)
def num_adapter_parameters(spec: ModelSpec, lora: LoraConfig) -> int:
    """Number of weights of all adapters."""
    return sum(one.size for one in adapter_parameters(spec, lora).values())
