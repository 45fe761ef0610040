"""What a table of parameters is made of: `ParameterSpec`, one row of it, and `Family`, the whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Literal

from msgspec import Struct

from llamarl.model_spec import ModelSpec

Kind = Literal["embedding", "norm", "head_norm", "bias", "attention_in", "attention_out", "mlp_in", "mlp_out", "head"]
ROWS, COLUMNS = 0, 1
FP8_TILE = 16  # sizes of a matrix that a GPU multiplies in fp8 are multiples of it
_PRODUCTS = ("attention_in", "attention_out", "mlp_in", "mlp_out")


class ParameterSpec(Struct, frozen=True):
    """One parameter: its Hugging Face name, its shape, its use, and how tensor parallelism cuts it."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    """Its use. Matrices of one kind in one layer read the same input, so they can be computed as one product. A `head_norm`
    is whole on every tensor rank, but each rank applies it to its own heads: its gradient is the sum over the ranks."""
    split: int | None = None
    """Dimension that tensor parallelism cuts; None: every rank holds the whole parameter."""
    unit: int = 1
    """Number of neighboring elements of that dimension that stay on one rank, such as those of a head."""
    copied: bool = False
    """Whether ranks hold copies of a unit where there are more ranks than units; the planner reckons with it."""

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

    def local_size(self, dim: int, ranks: int) -> float:
        """Size of a dimension on one of `ranks` tensor ranks, on average."""
        if dim != self.split:
            return self.shape[dim]
        return self.shape[dim] / (min(ranks, self.shape[dim] // self.unit) if self.copied else ranks)


Table = Callable[[ModelSpec], Iterable[ParameterSpec]]


class Family(Struct, frozen=True):
    """The table of a model family, in the order of the model: `before` the layers, each `layer`, and `after` them."""

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
