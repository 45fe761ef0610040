"""The KV cache in pages, and the attention that writes and reads them, in plain PyTorch.

[layers, kv heads, pages, tokens of a page, head_dim]. Which pages hold a sequence, and in which order, stands in a table
with one row for each slot. On a GPU, `kernels.py` holds the twin of `attend_pages`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.shapes import ModelShape


class PagedCache:
    def __init__(
        self,
        shape: ModelShape,
        num_pages: int,
        page_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tensor_ranks: int = 1,
    ) -> None:
        """Room for `num_pages` pages and page 0, which belongs to nobody; with `tensor_ranks`, for one rank's heads."""
        size = (shape.num_layers, shape.num_kv_heads // tensor_ranks, num_pages + 1, page_tokens, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.page_tokens = page_tokens

    def copy_pages(self, sources_P: Tensor, targets_P: Tensor) -> None:
        """What several sequences begin with, into pages that each will write on by itself."""
        for tensor in (self.keys, self.values):
            tensor[:, :, targets_P] = tensor[:, :, sources_P]


def page_bytes(shape: ModelShape, page_tokens: int, dtype: torch.dtype, tensor_ranks: int = 1) -> int:
    return 2 * shape.num_layers * shape.kv_size // tensor_ranks * page_tokens * dtype.itemsize


class PrefillAttention:
    """Whole sequences, causal, padded on the right; every token's key and value goes to its page as it is computed."""

    def __init__(self, cache: PagedCache, pages_RT: Tensor) -> None:
        """`pages_RT`: the page of each token; 0 where there is none, or where another row writes the same."""
        self._cache = cache
        self._pages_N = pages_RT.flatten()
        within_T = torch.arange(pages_RT.shape[1], device=pages_RT.device) % cache.page_tokens
        self._within_N = within_T.repeat(len(pages_RT))

    def __call__(self, layer: int, q_RTHD: Tensor, k_RTKD: Tensor, v_RTKD: Tensor) -> Tensor:
        for tensor, new_RTKD in ((self._cache.keys, k_RTKD), (self._cache.values, v_RTKD)):
            tensor[layer][:, self._pages_N, self._within_N] = new_RTKD.flatten(0, 1).transpose(0, 1)
        q, k, v = (x.transpose(1, 2) for x in (q_RTHD, k_RTKD, v_RTKD))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class DecodeAttention:
    """One new token per row: write its key and value, attend to everything up to it.

    On a CPU always over all pages of the table's row: with shapes that never change, a row's result does not depend on what
    the other rows hold.
    """

    def __init__(self, cache: PagedCache, table_SP: Tensor, slots_B: Tensor, positions_B: Tensor) -> None:
        self._cache, self._table_SP, self._slots_B, self._positions_B = cache, table_SP, slots_B, positions_B
        if table_SP.is_cuda:
            return
        self._table_BP = table_SP[slots_B].long()
        steps_T = torch.arange(table_SP.shape[1] * cache.page_tokens)
        self._mask_B11T = (steps_T[None] <= positions_B[:, None])[:, None, None]
        self._pages_B = self._table_BP.gather(1, positions_B[:, None] // cache.page_tokens)[:, 0]
        self._within_B = positions_B % cache.page_tokens

    def __call__(self, layer: int, q_B1HD: Tensor, k_B1KD: Tensor, v_B1KD: Tensor) -> Tensor:
        keys_KPTD, values_KPTD = self._cache.keys[layer], self._cache.values[layer]
        if q_B1HD.is_cuda:
            from llamarl.generate.kernels import attend_pages as attend_pages_on_gpu

            return attend_pages_on_gpu(
                q_B1HD, k_B1KD, v_B1KD, keys_KPTD, values_KPTD, self._table_SP, self._slots_B, self._positions_B
            )
        keys_KPTD[:, self._pages_B, self._within_B] = k_B1KD[:, 0].transpose(0, 1)
        values_KPTD[:, self._pages_B, self._within_B] = v_B1KD[:, 0].transpose(0, 1)
        return attend_pages(q_B1HD, keys_KPTD, values_KPTD, self._table_BP, self._mask_B11T)


def attend_pages(q_B1HD: Tensor, keys_KPTD: Tensor, values_KPTD: Tensor, table_BP: Tensor, mask_B11T: Tensor) -> Tensor:
    """Attention over the pages of each row."""
    k_BKTD, v_BKTD = (_read(pages_KPTD, table_BP) for pages_KPTD in (keys_KPTD, values_KPTD))
    out = F.scaled_dot_product_attention(q_B1HD.transpose(1, 2), k_BKTD, v_BKTD, attn_mask=mask_B11T, enable_gqa=True)
    return out.transpose(1, 2)


def _read(pages_KPTD: Tensor, table_BP: Tensor) -> Tensor:
    heads, _, _, size = pages_KPTD.shape
    read = pages_KPTD.index_select(1, table_BP.flatten())
    return read.view(heads, len(table_BP), -1, size).transpose(0, 1)
