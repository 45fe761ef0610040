"""Attention over the pages of the KV cache in plain PyTorch: for whole sequences, for several tokens that follow cached
ones, and for one new token per row. `attention_kernels.py` is the twin of `DecodeAttention` on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.generate.kv_cache import PagedCache, Pages
from llamarl.generate.kv_splits import SharedCut
from llamarl.model.ops import Rope, rotate
from llamarl.model.plain_attention import attend_heads, causal_mask, masked_attention, seen
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions


class PrefillAttention:
    """Attention of whole sequences, causal, padded on the right. Keys and values are written to their pages and attended to
    as stored there, so that reading a sequence again gives what decoding it gave."""

    def __init__(self, cache: PagedCache, pages_RT: Tensor) -> None:
        """`pages_RT`: the page of each token; 0 where there is no token, or where another row writes the same page."""
        self._cache = cache
        self._pages_N = pages_RT.flatten()
        within_T = torch.arange(pages_RT.shape[1], device=pages_RT.device) % cache.page_tokens
        self._within_N = within_T.repeat(len(pages_RT))

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        written = self._write(layer, k_RTKD, v_RTKD)
        return masked_attention(q_RTHD, *written, causal_mask(q_RTHD, options), options)

    def _write(self, layer: int, k_RTKD: Tensor, v_RTKD: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values; returns them as they can be read afterwards."""
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        if k_RTKD.is_cuda and not keys.narrow:
            from llamarl.generate.page_kernels import write_pages

            write_pages(k_RTKD, v_RTKD, keys, values, self._pages_N)
            return k_RTKD, v_RTKD
        k_NKD = keys.put(self._pages_N, self._within_N, k_RTKD.flatten(0, 1))
        v_NKD = values.put(self._pages_N, self._within_N, v_RTKD.flatten(0, 1))
        return k_NKD.view_as(k_RTKD), v_NKD.view_as(v_RTKD)


class ExtendAttention:
    """Attention of several tokens that follow cached ones, such as a tool's reply: the cached ones are not read again. Always
    over all pages of a row, so that a row's rounding does not depend on the length of others."""

    def __init__(self, cache: PagedCache, table_RP: Tensor, positions_RT: Tensor, pages_RT: Tensor) -> None:
        """`pages_RT`: the page of each token; 0 where there is no token."""
        self._cache, self._table_RP = cache, table_RP
        self._pages_N = pages_RT.flatten()
        self._within_N = (positions_RT % cache.page_tokens).flatten()
        self._steps_L = torch.arange(table_RP.shape[1] * cache.page_tokens, device=table_RP.device)
        self._positions_R1T1 = positions_RT[:, None, :, None]
        self._mask_R1TL = seen(self._positions_R1T1, self._steps_L, 0)

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        for pages, new_RTKD in ((keys, k_RTKD), (values, v_RTKD)):
            pages.put(self._pages_N, self._within_N, new_RTKD.flatten(0, 1))
        mask = seen(self._positions_R1T1, self._steps_L, options.window) if options.window else self._mask_R1TL
        return attend_pages(q_RTHD, keys, values, self._table_RP, mask, options)


class ChunkAttention:
    """Attention of many tokens that follow cached ones, of one sequence on a GPU: all its keys and values are copied side by
    side for PyTorch's FlashAttention, which aligns the last query with the last key."""

    def __init__(self, cache: PagedCache, table_P: Tensor, positions_T: Tensor, pages_T: Tensor, end: int) -> None:
        """`table_P`: the pages of the sequence, which has `end` tokens with these; `pages_T`: the page of each of these."""
        self._cache, self._table_1P, self._pages_T, self._end = cache, table_P[None], pages_T, end
        self._positions_T, self._within_T = positions_T, positions_T % cache.page_tokens
        counts = torch.tensor([[0, len(pages_T)], [0, end]], dtype=torch.int32).pin_memory()
        self._starts = counts.to(table_P.device, non_blocking=True)

    def __call__(
        self,
        layer: int,
        q_1THD: Tensor,
        k_1TKD: Tensor,
        v_1TKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        for pages, new_1TKD in ((keys, k_1TKD), (values, v_1TKD)):
            pages.put(self._pages_T, self._within_T, new_1TKD[0])
        if options.window or options.softcap:
            steps_L = torch.arange(self._table_1P.shape[1] * self._cache.page_tokens, device=q_1THD.device)
            mask = seen(self._positions_T[None, None, :, None], steps_L, options.window)
            return attend_pages(q_1THD, keys, values, self._table_1P, mask, options)
        k_LKD, v_LKD = (
            pages.read(self._table_1P, q_1THD.dtype)[0, :, : self._end].transpose(0, 1) for pages in (keys, values)
        )
        out_THD: Tensor = torch.ops.aten._flash_attention_forward(
            q_1THD[0],
            k_LKD,
            v_LKD,
            self._starts[0],
            self._starts[1],
            len(self._pages_T),
            self._end,
            0.0,
            True,
            False,
            scale=options.scale,
        )[0]
        return out_THD[None]


class Readings(NamedTuple):
    """Pages that several rows begin with, read once for all of them. Reading i serves `counts_B[i]` rows from `firsts_B[i]`
    on; row b gets its first `skips_B[b]` tokens from there. Used on a GPU only."""

    firsts_B: Tensor
    counts_B: Tensor
    skips_B: Tensor
    cut: SharedCut = SharedCut()


def members_of_reading(group: int) -> int:
    """Number of rows that one reading serves, each with `group` query heads for a key-value head: as many as fill a tensor
    core."""
    return max(1, min(8, 64 // group))


class DecodeAttention:
    """Attention of one new token per row: rotates query and key, writes key and value, attends to all tokens so far.

    On a CPU always over all pages of the table's row: since shapes never change, a row's result does not depend on the
    other rows.
    """

    rotates = True

    def __init__(
        self,
        cache: PagedCache,
        table_SP: Tensor,
        slots_B: Tensor,
        positions_S: Tensor,
        rope: Rope,
        readings: Readings | None = None,
        *,
        parts: int = 0,
        drafted: bool = False,
    ) -> None:
        """`rope`: tables of all positions, [T, 1, D]. `parts`: see `DecodeBatch`. With `drafted`, rows may attend to the new
        tokens of others; here they always may, since all are written first."""
        self._cache, self._table_SP, self._slots_B, self._positions_S = cache, table_SP, slots_B, positions_S
        self._rope, self._readings, self._parts, self._drafted = rope, readings, parts, drafted
        if table_SP.is_cuda:
            return
        positions_B = positions_S[slots_B]
        self._rope_B = tuple(part[positions_B][:, None] for part in rope)
        self._table_BP = table_SP[slots_B].long()
        self._steps_T = torch.arange(table_SP.shape[1] * cache.page_tokens)
        self._positions_B111 = positions_B[:, None, None, None]
        self._mask_B11T = seen(self._positions_B111, self._steps_T, 0)
        self._pages_B = self._table_BP.gather(1, positions_B[:, None] // cache.page_tokens)[:, 0]
        self._within_B = positions_B % cache.page_tokens

    def __call__(
        self,
        layer: int,
        q_B1HD: Tensor,
        k_B1KD: Tensor,
        v_B1KD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        keys, values, pair = self._cache.keys(layer), self._cache.values(layer), slice(options.rope, options.rope + 2)
        if q_B1HD.is_cuda:
            from llamarl.generate.attention_kernels import attend_pages as attend_pages_on_gpu

            qkv, where = (q_B1HD, k_B1KD, v_B1KD), (self._table_SP, self._slots_B, self._positions_S)
            # Sequences that begin alike see different parts of what they share through a window, so they read it apart.
            readings = None if options.window else self._readings
            return attend_pages_on_gpu(
                qkv,
                keys,
                values,
                *where,
                self._rope[pair],
                readings,
                parts=self._parts,
                drafted=self._drafted,
                options=options,
            )
        rope_B = self._rope_B[pair]
        q_B1HD, k_B1KD = rotate(q_B1HD, rope_B), rotate(k_B1KD, rope_B)
        keys.put(self._pages_B, self._within_B, k_B1KD[:, 0])
        values.put(self._pages_B, self._within_B, v_B1KD[:, 0])
        mask = seen(self._positions_B111, self._steps_T, options.window) if options.window else self._mask_B11T
        return attend_pages(q_B1HD, keys, values, self._table_BP, mask, options)


def attend_pages(
    q_B1HD: Tensor,
    keys: Pages,
    values: Pages,
    table_BP: Tensor,
    mask_B11T: Tensor,
    options: AttentionOptions = PLAIN_ATTENTION,
) -> Tensor:
    """Attention over the pages of each row."""
    k_BKTD, v_BKTD = (pages.read(table_BP, q_B1HD.dtype) for pages in (keys, values))
    return attend_heads(q_B1HD.transpose(1, 2), k_BKTD, v_BKTD, mask_B11T, options).transpose(1, 2)
