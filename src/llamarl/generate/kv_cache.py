"""The KV cache in pages: [layers, kv heads, pages, tokens of a page, head_dim].

A table with one row for each slot says which pages hold its sequence, in order. `attention.py` writes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.model.quantize import FP8, quantize_rows
from llamarl.model_spec import ModelSpec

if TYPE_CHECKING:
    from llamarl.generate.route_pages import RoutePages

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Pages:
    """Keys or values of one layer, [K, P, T, D]; in fp8 as bytes, with a scale for every vector, [K, P, T]."""

    values_KPTD: Tensor
    scales_KPT: Tensor | None

    @property
    def narrow(self) -> bool:
        return self.scales_KPT is not None

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        """Arguments of a kernel: the values (pairs of them in fp8) and the scales; without scales, any tensor."""
        if self.scales_KPT is None:
            return self.values_KPTD, self.values_KPTD
        return self.values_KPTD.view(torch.int16), self.scales_KPT

    def put(self, pages_N: Tensor, within_N: Tensor, new_NKD: Tensor) -> Tensor:
        """Write vectors to their places; returns them as they can be read afterwards, [N, K, D]."""
        stored_NKD = new_NKD
        if self.scales_KPT is not None:
            narrow_NKD, scales_NK = quantize_rows(new_NKD, FP8)
            self.scales_KPT[:, pages_N, within_N] = scales_NK.t()
            stored_NKD = (narrow_NKD.float() * scales_NK[..., None]).to(new_NKD.dtype)
            new_NKD = narrow_NKD.view(torch.uint8)  # few operations of PyTorch support fp8
        self.values_KPTD[:, pages_N, within_N] = new_NKD.transpose(0, 1)
        return stored_NKD

    def read(self, table_BP: Tensor, dtype: torch.dtype) -> Tensor:
        """The contents of these pages, [B, K, P * T, D]."""
        read = self.values_KPTD.index_select(1, table_BP.flatten())
        if self.scales_KPT is not None:
            scales = self.scales_KPT.index_select(1, table_BP.flatten())
            read = (read.view(FP8).float() * scales[..., None]).to(dtype)
        return read.view(len(read), len(table_BP), -1, read.shape[-1]).transpose(0, 1)


class PagedCache:
    """Keys and values of all layers, in pages."""

    def __init__(
        self,
        shape: ModelSpec,
        num_pages: int,
        page_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tensor_ranks: int = 1,
        routes: RoutePages | None = None,
    ) -> None:
        """Room for `num_pages` pages besides page 0, which no sequence holds; of the heads of one of `tensor_ranks` ranks.
        `routes` are the experts of the same tokens, where they are recorded."""
        size = (shape.num_layers, shape.num_kv_heads // tensor_ranks, num_pages + 1, page_tokens, shape.head_dim)
        narrow = dtype == FP8
        self._parts = [
            torch.zeros(size, dtype=torch.uint8 if narrow else dtype, device=device),
            torch.zeros(size, dtype=torch.uint8 if narrow else dtype, device=device),
        ]
        if narrow:
            self._parts += [torch.zeros(size[:-1], dtype=torch.float32, device=device) for _ in range(2)]
        self.page_tokens, self.num_kv_heads, self.narrow = page_tokens, size[1], narrow
        self.routes = routes
        self.token_bytes = 2 * size[1] * size[-1] * dtype.itemsize  # of one token in one layer

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers and, in fp8, the scales of both."""
        return self._parts

    def keys(self, layer: int) -> Pages:
        return self._pages(0, layer)

    def values(self, layer: int) -> Pages:
        return self._pages(1, layer)

    def _pages(self, which: int, layer: int) -> Pages:
        scales = self._parts[2 + which][layer] if len(self._parts) > 2 else None
        return Pages(self._parts[which][layer], scales)

    def copy_pages(self, sources_P: Tensor, targets_P: Tensor) -> None:
        """Copy pages that several sequences begin with into pages that each sequence goes on writing."""
        for tensor in self._parts:
            tensor[:, :, targets_P] = tensor[:, :, sources_P]
        if self.routes is not None:
            self.routes.copy_pages(sources_P, targets_P)


def page_bytes(shape: ModelSpec, page_tokens: int, dtype: torch.dtype, tensor_ranks: int = 1) -> int:
    """Memory of one page over all layers, on one rank."""
    each = shape.head_dim * dtype.itemsize + (_SCALE_BYTES if dtype == FP8 else 0)
    return 2 * shape.num_layers * (shape.num_kv_heads // tensor_ranks) * page_tokens * each
