"""Triton kernel that writes keys and values of whole sequences to pages, for prefill. Imported only where a GPU decodes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from llamarl.generate.kv_cache import Pages


@triton.jit
def _write_pages(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    pages_ptr,
    tokens,
    k_row,
    v_row,
    head_tokens,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.arange(0, PADDED)
    in_size = size < SIZE
    where = head.to(tl.int64) * head_tokens + tl.load(pages_ptr + token) * PAGE + (token % tokens) % PAGE
    from_head = head * SIZE + size
    k = tl.load(k_ptr + token * k_row + from_head, mask=in_size, other=0.0)
    v = tl.load(v_ptr + token * v_row + from_head, mask=in_size, other=0.0)
    tl.store(keys_ptr + where * SIZE + size, k, mask=in_size)
    tl.store(values_ptr + where * SIZE + size, v, mask=in_size)


def write_pages(k_RTKD: Tensor, v_RTKD: Tensor, keys: Pages, values: Pages, pages_N: Tensor) -> None:
    """Write keys and values of whole sequences to their pages: `Pages.put` of both. Not for fp8 pages."""
    kv_heads, num_pages, page_tokens, size = keys.values_KPTD.shape
    k_NKD, v_NKD = k_RTKD.flatten(0, 1), v_RTKD.flatten(0, 1)
    _write_pages[(len(pages_N), kv_heads)](
        k_NKD,
        v_NKD,
        keys.values_KPTD,
        values.values_KPTD,
        pages_N,
        k_RTKD.shape[1],
        k_NKD.stride(0),
        v_NKD.stride(0),
        num_pages * page_tokens,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        PAGE=page_tokens,
        num_warps=1,
    )
