"""PyTorch's variable-length FlashAttention: runs of queries and of keys in one row, given by where they begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_LONGEST = 1024  # tokens; longest run that attention is launched for at least


def starts_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where each run of tokens begins, and where the last one ends."""
    starts_D = F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    starts_D = starts_D.to(device, non_blocking=True)
    torch._dynamo.maybe_mark_dynamic(starts_D, 0)  # packs hold any number of documents
    return starts_D


def longest_of(lengths: Sequence[int], least: int = _LONGEST) -> int:
    """A power of two that most packs have in common, since blocks are compiled again for every new value."""
    return max(least, 1 << (max(lengths) - 1).bit_length())


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, logarithms of the sums [H, Q] of the softmax, and what the backward pass wants besides."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False
    )
    return found[0], found[1], found[2], found[3]


def flash_backward(
    given: tuple[Tensor, ...],
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    random: Tensor,
    unused: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given those of the output, then q, k, v, the output and its sums."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *given, starts_q, starts_k, longest_q, longest_k, 0.0, causal, random, unused
    )
    return found
