"""The keys and values of every slot, and the attention that writes and reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.shapes import ModelShape


class KVCache:
    """[layers, slots, kv heads, length, head_dim], one fixed stretch for each slot."""

    def __init__(
        self, shape: ModelShape, slots: int, length: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        size = (shape.num_layers, slots, shape.num_kv_heads, length, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.length = length

    def fill(self, slots: Tensor, keys_LKTD: Tensor, values_LKTD: Tensor) -> None:
        """Give every slot of a group the same prompt, computed once."""
        end = keys_LKTD.shape[2]
        self.keys[:, slots, :, :end] = keys_LKTD[:, None]
        self.values[:, slots, :, :end] = values_LKTD[:, None]


class DecodeAttention:
    """One new token per slot: append its key and value, attend to everything up to it.

    Always over the full length of the cache: with shapes that never change, a row's result does not depend on what the
    other rows hold.
    """

    def __init__(self, cache: KVCache, positions_B: Tensor) -> None:
        self._cache, self._positions_B = cache, positions_B
        self._rows_B = torch.arange(len(positions_B), device=positions_B.device)
        steps = torch.arange(cache.length, device=positions_B.device)
        self._mask_B11T = (steps[None] <= positions_B[:, None])[:, None, None]

    def __call__(self, layer: int, q_B1HD: Tensor, k_B1KD: Tensor, v_B1KD: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows_B, :, self._positions_B] = k_B1KD[:, 0]
        values[self._rows_B, :, self._positions_B] = v_B1KD[:, 0]
        out = F.scaled_dot_product_attention(
            q_B1HD.transpose(1, 2), keys, values, attn_mask=self._mask_B11T, enable_gqa=True
        )
        return out.transpose(1, 2)


class PrefillAttention:
    """Whole prompts, causal, padded on the right; remembers the keys and values of every layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        self.keys.append(k)
        self.values.append(v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
