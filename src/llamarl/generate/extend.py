"""Attention of tokens that come behind a cache: a tool's reply is read on, and what was before it is not read again."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.generate.kv_cache import PagedCache, attend_pages


class ExtendAttention:
    """Every token's key and value goes to its page, then it attends to all up to it. Always over all pages of a row, so
    that a row's rounding does not depend on how long the others are."""

    def __init__(self, cache: PagedCache, table_RP: Tensor, positions_RT: Tensor, pages_RT: Tensor) -> None:
        """`pages_RT`: the page of each token; 0 where there is none."""
        self._cache, self._table_RP = cache, table_RP
        self._pages_N = pages_RT.flatten()
        self._within_N = (positions_RT % cache.page_tokens).flatten()
        steps_L = torch.arange(table_RP.shape[1] * cache.page_tokens, device=table_RP.device)
        self._mask_R1TL = (steps_L <= positions_RT[..., None])[:, None]

    def __call__(self, layer: int, q_RTHD: Tensor, k_RTKD: Tensor, v_RTKD: Tensor) -> Tensor:
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        for pages, new_RTKD in ((keys, k_RTKD), (values, v_RTKD)):
            pages.put(self._pages_N, self._within_N, new_RTKD.flatten(0, 1))
        return attend_pages(q_RTHD, keys, values, self._table_RP, self._mask_R1TL)
