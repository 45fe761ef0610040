"""Tensors that are spread over ranks: DTensors, recognized without importing them, which takes half a second that a lone rank
need not spend."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether the tensor is spread over ranks. Not for code that is compiled, which cannot look at `sys.modules`."""
    module = sys.modules.get("torch.distributed.tensor")
    # Another thread may be importing it now. Then no tensor is spread yet.
    return isinstance(tensor, getattr(module, "DTensor", ()))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor, which may be whole; also in code that is compiled."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
