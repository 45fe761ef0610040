"""Attention with a mask, in plain PyTorch, for every option that a layer can have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.model.ops import softcapped
from llamarl.model_spec import AttentionOptions


def causal_mask(q_BTHD: Tensor, options: AttentionOptions) -> Tensor | None:
    """The mask of whole sequences that start at position 0, [T, T]; None if plain causal attention needs none."""
    length = q_BTHD.shape[1]
    if not options.softcap and not 0 < options.window < length:
        return None
    positions_T = torch.arange(length, device=q_BTHD.device)
    return seen(positions_T[:, None], positions_T[None], options.window)


def seen(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Whether queries see keys, by their positions: those up to their own, and with a window the latest of them."""
    causal = keys <= queries
    return causal & (keys > queries - window) if window else causal


def masked_attention(
    q_BTHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attention where the mask allows it; without a mask, causal over whole sequences."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BLKD, v_BLKD))
    return attend_heads(q, k, v, mask, options).transpose(1, 2)


def attend_heads(
    q_BHTD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """The same with heads before tokens."""
    if not options.softcap:
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKLD, v_BKLD, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=options.scale
        )
    assert mask is not None
    return _softcapped_attention(q_BHTD, k_BKLD, v_BKLD, mask, options)


def _softcapped_attention(
    q_BHTD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """Scores and weights in fp32; no library's attention bounds its scores."""
    scale = q_BHTD.shape[-1] ** -0.5 if options.scale is None else options.scale
    group = q_BHTD.shape[1] // k_BKLD.shape[1]
    k_BHLD, v_BHLD = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k_BKLD, v_BKLD))
    scores_BHTL = softcapped(q_BHTD.float() @ k_BHLD.float().transpose(2, 3) * scale, options.softcap)
    weights_BHTL = scores_BHTL.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights_BHTL.to(v_BKLD.dtype) @ v_BHLD
