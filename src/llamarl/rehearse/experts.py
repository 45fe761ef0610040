"""What rehearsals know of experts: the operations that take memory inside, and what is one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llamarl.model import expert_products

EXPERT_OPERATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.llamarl.experts.default: expert_products.forward_of_experts,
    torch.ops.llamarl.experts_backward.default: expert_products.backward_of_experts,
}
EXPERT_TWINS = expert_products.activated, expert_products.sum_rows, expert_products.gated_backward
