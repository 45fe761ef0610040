"""PyTorch's variable-length FlashAttention: runs of queries and of keys in one row, given by where they begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.model_spec import AttentionOptions
from llamarl.train.fp16 import HalfFlash, flash_options

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


def causal_flash(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    options: AttentionOptions,
) -> Tensor:
    """Causal attention; the last query of a document is at its last key. fp32 operands mean an fp16 forward and a bf16
    backward pass."""
    ends = starts_q, starts_k, longest_q, longest_k
    if q_THD.dtype == torch.float32:
        how = options.scale, options.window
        half_THD: Tensor = HalfFlash.apply(q_THD, k_TKD, v_TKD, *ends, *how)  # type: ignore[no-untyped-call]
        return half_THD
    out_THD: Tensor = torch.ops.aten._flash_attention_forward(
        q_THD, k_TKD, v_TKD, *ends, 0.0, True, False, **flash_options(options.scale, options.window)
    )[0]
    return out_THD


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, logarithms of the sums [H, Q] of the softmax, and what the backward pass wants besides."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False, **flash_options(scale, window)
    )
    return found[0], found[1], found[2], found[3]


@torch.library.custom_op("llamarl::row_major", mutates_args=())
def row_major(x: Tensor) -> Tensor:
    """A copy whose rows lie one behind another, also in compiled code. There `contiguous()` is no promise: Inductor lays a
    result that it computes itself out as its operands lie, and asks nothing for the sums that FlashAttention's backward pass
    is given, which must be contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


@row_major.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def flash_backward(
    given: tuple[Tensor, ...],
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    random: Tensor,
    unused: Tensor,
    scale: float | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given those of the output, then q, k, v, the output and its sums."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *given, starts_q, starts_k, longest_q, longest_k, 0.0, causal, random, unused, **flash_options(scale, window)
    )
    return found
