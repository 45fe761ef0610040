"""The two computations of generation, with shapes that never change: read prompts, and decode one token in every slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.generate.cache import DecodeAttention, KVCache, PrefillAttention
from llamarl.generate.sampling import sample_tokens
from llamarl.model.transformer import Transformer

PREFILL_ROWS = 16  # products of fewer rows may round differently
MIN_BUCKET = 16


def bucket_of(num_tokens: int) -> int:
    """Prompts are padded to the next power of two, so that few shapes occur; 0 stays 0."""
    return max(MIN_BUCKET, 1 << (num_tokens - 1).bit_length()) if num_tokens else 0


@torch.inference_mode()
def prefill(
    model: Transformer, cache: KVCache, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]
) -> None:
    """Fill the slots of each group with the keys and values of its prompt, all but the last token, computed once.

    At most PREFILL_ROWS prompts, whose lengths without the last token share a bucket. The last token is left to the first
    decode step, so that every sampled token comes out of the same computation.
    """
    bucket = bucket_of(len(prompts[0]) - 1)
    if bucket == 0:
        return
    device = model.lm_head.weight.device
    tokens = torch.zeros(PREFILL_ROWS, bucket, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt) - 1] = torch.tensor(prompt[:-1])
    attend = PrefillAttention()
    model(tokens.to(device), torch.arange(bucket, device=device).expand(PREFILL_ROWS, bucket), attend)
    keys, values = torch.stack(attend.keys), torch.stack(attend.values)
    for row, group in enumerate(slots):
        cache.fill(torch.tensor(group, device=device), keys[:, row], values[:, row])


@torch.inference_mode()
def decode_step(
    model: Transformer, cache: KVCache, tokens_B: Tensor, positions_B: Tensor, draws_B: Tensor, temperatures_B: Tensor
) -> tuple[Tensor, Tensor]:
    """One token in every slot: its number and its log-prob under the distribution it was drawn from."""
    hidden_B1C = model(tokens_B[:, None], positions_B[:, None], DecodeAttention(cache, positions_B))
    return sample_tokens(model.logits(hidden_B1C[:, 0]), draws_B, temperatures_B)
