"""What a model family is made of: its parameters (`ParameterSpec`), the keys of its config (`ConfigKey`), and `Family`, the
table that holds both with all that its models have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, Literal

from msgspec import Struct

from llamarl.model_spec import ModelSpec

Kind = Literal[
    "embedding",
    "norm",
    "head_norm",
    "wide_norm",
    "bias",
    "attention_in",
    "attention_out",
    "mlp_in",
    "mlp_out",
    "router",
    "expert_in",
    "expert_out",
    "head",
    "adapter",
    "expert_adapter",
]
ROWS, COLUMNS = 0, 1
FP8_TILE = 16  # sizes of a matrix that a GPU multiplies in fp8 are multiples of it
_PRODUCTS = ("attention_in", "attention_out", "mlp_in", "mlp_out")


class ParameterSpec(Struct, frozen=True):
    """One parameter: its Hugging Face name, its shape, its use, and how tensor parallelism cuts it."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    """Its use. Matrices of one kind in one layer read the same input, so they can be computed as one product."""
    split: int | None = None
    """Dimension that tensor parallelism cuts; None: every rank holds the whole parameter."""
    unit: int = 1
    """Number of neighboring elements of that dimension that stay on one rank, such as those of a head."""
    copied: bool = False
    """Whether ranks hold copies of a unit where there are more ranks than units; the planner reckons with it."""
    stored: str = ""
    """Name of the tensor in files that holds it among others, one behind another, as Phi-3's do; empty: its own name."""
    also: str = ""
    """Another name of it in files: transformers 5 can save a model under the names of its own modules."""
    each: tuple[str, ...] = ()
    """Names of the tensors that hold the matrices of one `{expert}` in files, where these have tensors of their own."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Name of the module that owns the parameter."""
        return self.name.rpartition(".")[0]

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix of a layer, which every token is multiplied with. Only these are quantized."""
        return self.kind in _PRODUCTS

    @property
    def is_expert(self) -> bool:
        """Whether it holds matrices of all experts of a layer, of which each token is multiplied with a few."""
        return self.kind in ("expert_in", "expert_out")

    @property
    def by_expert(self) -> bool:
        """Whether its first dimension counts the experts of a layer."""
        return self.is_expert or self.kind == "expert_adapter"

    @property
    def has_partial_gradient(self) -> bool:
        """Whether it is whole on every tensor rank (or on every one with the same experts), but each rank applies it to its
        own part of the states, such as its heads, or of the experts' inner units: its gradient is the sum over the ranks."""
        is_adapter = self.kind in ("adapter", "expert_adapter")
        return self.kind in ("head_norm", "router") or (is_adapter and self.split is None)

    def local_size(self, dim: int, ranks: int) -> float:
        """Size of a dimension on one of `ranks` tensor ranks, on average."""
        if dim != self.split:
            return self.shape[dim]
        return self.shape[dim] / (min(ranks, self.shape[dim] // self.unit) if self.copied else ranks)


Table = Callable[[ModelSpec], Iterable[ParameterSpec]]
Config = Mapping[str, Any]  # the contents of config.json, with the defaults of the family


class ConfigKey(Struct, frozen=True):
    """A key of config.json that sets fields of the spec."""

    key: str
    fields: tuple[str, ...]
    default: Any
    """Value in transformers where the key is missing."""
    type: type = float
    """Type of its value: bool, int for a count, or float for any number."""
    read: Callable[[Any], Any] = lambda value: value
    """The spec's value of a value in the file."""
    write: Callable[[Any], Any] = lambda value: value
    """The inverse of `read`."""
    written: bool = False
    """Whether it is written even where it has its default."""
    nullable: bool = False
    """Whether null is a value of its own; otherwise it means the default."""
    also: tuple[str, ...] = ()
    """Other names of the key, which are read as well."""


class Family(Struct, frozen=True):
    """The table of a model family: its parameters in the order of the model (`before` the layers, each `layer`, and `after`
    them), and how config.json describes its models."""

    embedding: str
    """Name of the embedding. In a model with a tied head it is the head, too."""
    head: str
    """Name of the head. `after` always lists it."""
    before: Table
    layer: Table
    """Parameters of one layer, with names that start behind `layer_prefix`."""
    after: Table
    layer_prefix: str = "model.layers.{index}."
    derived: str = ""
    """Pattern of tensor names that checkpoints may contain and that are not read, since the config determines them."""
    name: str = ""
    """`model_type` in config.json."""
    title: str = ""
    """Names of its models, for people."""
    architecture: str = ""
    """Class in transformers."""
    fixed: Mapping[str, Any] = {}
    """Fields of the spec that all of its models have in common."""
    sized: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Fields of the spec that follow from several keys, such as sizes."""
    keys: tuple[ConfigKey, ...] = ()
    """Keys of its own."""
    more_keys: tuple[str, ...] = ()
    """Further keys of its own, which `sized` reads and `described` writes."""
    described: Callable[[ModelSpec], Mapping[str, Any]] = lambda spec: {}
    """The values of `more_keys` for a spec."""
    only: Mapping[str, tuple[Any, ...]] = {}
    """Keys that may have these values only, besides those of all families (`model/hf_keys.py`)."""
    harmless: tuple[str, ...] = ()
    """Keys that its models carry and that change nothing."""
    defaults: Mapping[str, Any] = {}
    """Values in transformers of common keys that are missing, where they differ from those of `HFConfig`."""
    needs: tuple[str, ...] = ()
    """Keys that must be there, since their defaults are sizes of one model."""
    windowed: Callable[[int, Config], bool] | None = None
    """Whether a layer has a sliding window where `layer_types` does not say; None: no layer can have one."""
    window_switch: str = ""
    """Key that switches windows on; empty: a window that is given is on."""
    layer_types: bool = False
    """Whether its config can list the type of every layer."""
    local_rope: Literal["none", "theta", "same theta"] = "none"
    """Whether layers with a window rotate apart from the others: by a base of their own, or by the same one, unscaled."""
    rope_theta: float = 10_000.0
    """RoPE base where config.json does not say."""
    ropes: tuple[str, ...] = ("default", "llama3", "linear", "dynamic", "yarn", "longrope")
    """Types of RoPE that its models may have."""
    rope_names: Mapping[str, str] = {}
    """Old names of these types."""
    surplus_tokens: tuple[str, ...] = ()
    """Special tokens that its tokenizers know and its models have no row for."""
    partial_rotary: bool = False
    """Whether a part of each head may be rotated."""
