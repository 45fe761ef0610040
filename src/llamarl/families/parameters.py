"""The parameters of a model, looked up in the table of its family, and sums over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

from msgspec.structs import replace

from llamarl.families.dense import DENSE
from llamarl.families.experts import EXPERTS
from llamarl.families.family import Family, ParameterSpec
from llamarl.model_spec import ModelSpec

FAMILIES: dict[str, Family] = {family.name: family for family in (*DENSE, *EXPERTS)}


def family_of(spec: ModelSpec) -> Family:
    return FAMILIES[spec.family]


@lru_cache(maxsize=64)
def parameters(spec: ModelSpec) -> Mapping[str, ParameterSpec]:
    """Maps the name of every parameter to its row, in the model's order. A tied head appears once, as the embedding."""
    return MappingProxyType({parameter.name: parameter for parameter in _all(spec)})


def _all(spec: ModelSpec) -> Iterator[ParameterSpec]:
    family = family_of(spec)
    yield from family.before(spec)
    for index in range(spec.num_layers):
        prefix = family.layer_prefix.format(index=index)
        yield from (_in_layer(parameter, prefix) for parameter in layer_parameters(spec, index))
    yield from (parameter for parameter in family.after(spec) if parameter.name != family.head or not spec.tied_head)


def layer_parameters(spec: ModelSpec, layer: int) -> tuple[ParameterSpec, ...]:
    """Rows of one layer, with names that start behind the layer's prefix."""
    return _rows_of_layer(spec if spec.has_experts(layer) or not spec.experts else replace(spec, experts=0))


@lru_cache(maxsize=64)
def _rows_of_layer(spec: ModelSpec) -> tuple[ParameterSpec, ...]:
    return tuple(family_of(spec).layer(spec))


def _in_layer(parameter: ParameterSpec, prefix: str) -> ParameterSpec:
    stored, also = (prefix + name if name else "" for name in (parameter.stored, parameter.also))
    each = tuple(prefix + name for name in parameter.each)
    return replace(parameter, name=prefix + parameter.name, stored=stored, also=also, each=each)


def head_size(spec: ModelSpec) -> int:
    """Number of weights of the head, tied or not."""
    return spec.vocab_size * spec.hidden_size


def stored_tensors(spec: ModelSpec) -> Mapping[str, list[ParameterSpec]]:
    """Maps the name of every tensor in a model's files to the parameters whose rows it holds, one behind another."""
    found: dict[str, list[ParameterSpec]] = {}
    for parameter in parameters(spec).values():
        found.setdefault(parameter.stored or parameter.name, []).append(parameter)
    return found


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Maps the name of every parameter to its shape."""
    return {name: parameter.shape for name, parameter in parameters(spec).items()}


def embedding_of(spec: ModelSpec) -> ParameterSpec:
    return parameters(spec)[family_of(spec).embedding]


def head_of(spec: ModelSpec) -> ParameterSpec:
    """The head; the embedding where it is tied."""
    family = family_of(spec)
    return parameters(spec)[family.embedding if spec.tied_head else family.head]


def tied_name(name: str) -> str:
    """Name under which a tied head is stored: the embedding's. Other names are returned as they are."""
    return next((family.embedding for family in FAMILIES.values() if family.head == name), name)


@lru_cache(maxsize=64)
def num_parameters(spec: ModelSpec) -> int:
    """Number of weights of the whole model."""
    return sum(parameter.size for parameter in parameters(spec).values())


@lru_cache(maxsize=64)
def block_parameters(spec: ModelSpec) -> int:
    """Number of weights in the matrices of all layers, all experts included."""
    return sum(parameter.size for parameter in parameters(spec).values() if _is_matrix(parameter))


@lru_cache(maxsize=64)
def active_block_parameters(spec: ModelSpec) -> int:
    """Number of weights in the matrices of all layers that each token is multiplied with: of experts, those of a few."""
    found = block_parameters(spec)
    experts = sum(parameter.size for parameter in parameters(spec).values() if parameter.is_expert)
    return found - experts + experts * spec.experts_per_token // spec.experts if experts else found


def _is_matrix(parameter: ParameterSpec) -> bool:
    return parameter.is_product or parameter.is_expert or parameter.kind == "router"


def matrix_parameters(spec: ModelSpec) -> int:
    """Number of weights that each token is multiplied with: all matrices with the head, without the embedding's lookup."""
    return active_block_parameters(spec) + head_of(spec).size
