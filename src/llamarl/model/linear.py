"""Linear layers that take the place of the model's own and compute the product in another way.

Quantized weights, sums over tensor ranks and fused projections are applied so, from outside: the transformer does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Product = Callable[[Any], Tensor]  # x @ weight.t() + bias, in any way and for any form of x


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All rows of these tensors as one tensor: where they are, if they lie one behind another, otherwise copied."""
    first = tensors[0]
    if all(_follows(one, other) for one, other in pairwise(tensors)):
        rows = sum(map(len, tensors))
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat(list(tensors))


def _follows(one: Tensor, other: Tensor) -> bool:
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.dtype == other.dtype
    packed = one.is_contiguous() and other.is_contiguous() and one.shape[1:] == other.shape[1:]
    return same and packed and one.data_ptr() + one.nbytes == other.data_ptr()


class JoinedLinear:
    """Several layers that read the same input, as one product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ReplacedLinear(nn.Linear):
    """Replaces a layer and keeps its parameters, but computes the product in another way. Its bias is left to
    `ops.add_projection`, which adds it once, however many ranks share the product."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.product: Product = JoinedLinear(layer.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)
