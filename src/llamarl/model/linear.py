"""Linear layers that take the place of the model's own and compute the product in another way.

Quantized weights, sums over tensor ranks and fused projections are applied so, from outside: the transformer does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

Product = Callable[[Any], Tensor]  # x @ weight.t() + bias, in any way and for any form of x


class JoinedLinear:
    """Several layers that read the same input, as one product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ReplacedLinear(nn.Linear):
    """Replaces a layer and keeps its parameter, but computes the product in another way."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.weight = layer.weight
        self.product: Product = JoinedLinear(layer.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)
