"""Attention inside documents: a token sees its own document up to itself, and nothing else of its row.

Each pack has its own mask, in one of several forms. All layers get the same object, so that compiled blocks share one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llamarl.model.gpu_paths import on_gpu
from llamarl.model.plain_attention import masked_attention
from llamarl.model.transformer import Attend
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions, ModelSpec
from llamarl.train.flash import causal_flash, longest_of, starts_of
from llamarl.train.packing import NO_PARENT, Pack
from llamarl.train.tree_attention import FlashTrees

CUDNN = SDPBackend.CUDNN_ATTENTION
_CUDNN_HEAD = 128  # largest size of a head
_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def uses_long_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packs are one long row, because attention skips everything outside a document."""
    return on_gpu(device) and dtype in _FLASH_DTYPES


def not_by_cudnn(shape: ModelSpec) -> str:
    """What keeps a model from cuDNN's attention; empty if nothing does."""
    if any(shape.windows):
        return "windows"
    if shape.attention_softcap:
        return "bound of the scores"
    return f"heads of {shape.head_dim}" if shape.head_dim > _CUDNN_HEAD else ""


def document_attention(pack: Pack, *, long_rows: bool, cudnn_from: int = 0, window: int = 0) -> Attend:
    """The attention of a pack. `cudnn_from`: length from which documents that cuDNN can take are given to it; 0: none.
    `window`: longest window of the model's layers; 0: none."""
    if not long_rows:
        return MaskedDocuments(pack)
    if pack.is_shared:
        return FlashTrees(pack, window)
    suits = cudnn_from and CudnnDocuments.takes(pack) and max(pack.lengths) >= cudnn_from
    return CudnnDocuments(pack) if suits else FlashDocuments(pack)


class MaskedDocuments:
    """Attention with a mask of each row's documents: it works on any device and is quadratic in the row's length."""

    def __init__(self, pack: Pack) -> None:
        numbers_RT = pack.nodes_RT
        if pack.is_shared:
            seen_RTT = ancestors_of(pack)[numbers_RT[:, :, None], numbers_RT[:, None, :]]
        else:
            seen_RTT = numbers_RT[:, :, None] == numbers_RT[:, None, :]
        self.mask_R1TT = seen_RTT.tril_()[:, None]
        self.positions_RT = pack.positions_RT

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        return masked_attention(q_RTHD, k_RTKD, v_RTKD, self._mask(options.window), options)

    def _mask(self, window: int) -> Tensor:
        if not window:
            return self.mask_R1TT
        queries_R1T1, keys_R11T = self.positions_RT[:, None, :, None], self.positions_RT[:, None, None]
        return self.mask_R1TT & (keys_R11T > queries_R1T1 - window)


class FlashDocuments:
    """Attention over one long row, cut where documents begin: PyTorch's variable-length FlashAttention."""

    def __init__(self, pack: Pack) -> None:
        device, width = pack.tokens_RT.device, pack.tokens_RT.numel()
        lengths = [*pack.lengths, width - sum(pack.lengths)]  # the tail is a document that is ignored
        self.starts_D, self.longest = starts_of(lengths, device), longest_of(lengths)

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        ends = self.starts_D, self.starts_D, self.longest, self.longest
        return causal_flash(q_RTHD[0], k_RTKD[0], v_RTKD[0], *ends, options)[None]


class CudnnDocuments:
    """Attention over one long row that is a batch of equal documents: cuDNN's, which knows no documents of other lengths."""

    def __init__(self, pack: Pack) -> None:
        self.count = len(pack.nodes)

    @staticmethod
    def takes(pack: Pack) -> bool:
        """Whether all documents have one length and fill the row. A single one need not: no token of it sees the tail."""
        lengths = pack.lengths
        return len(lengths) == 1 or (len(set(lengths)) == 1 and sum(lengths) == pack.tokens_RT.numel())

    def __call__(
        self,
        layer: int,
        q_RTHD: Tensor,
        k_RTKD: Tensor,
        v_RTKD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        assert not options.window
        q, k, v = (x.reshape(self.count, -1, *x.shape[2:]).transpose(1, 2) for x in (q_RTHD, k_RTKD, v_RTKD))
        with sdpa_kernel(CUDNN):
            out_BHLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=options.scale)
        return out_BHLD.transpose(1, 2).flatten(0, 1)[None]


def ancestors_of(pack: Pack) -> Tensor:
    """Whether a node (row) sees another one (column): itself and all before it in its documents. Padding, which is -1 and so
    the last row, sees itself."""
    seen = torch.eye(len(pack.nodes) + 1, dtype=torch.bool)
    for number, node in enumerate(pack.nodes):
        if node.parent != NO_PARENT:
            seen[number] |= seen[node.parent]
    return seen.to(pack.tokens_RT.device)
