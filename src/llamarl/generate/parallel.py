"""Tensor parallelism inside a replica: every rank holds some heads, a part of the inner width and of the vocabulary, and
whole experts or a part of each.

Applied to the model from outside: the outputs of attention and MLP are summed over ranks, embeddings are looked up on the
rank that has them and summed, and the head's scores are gathered, so every rank draws the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from llamarl.families.family import ParameterSpec
from llamarl.families.parameters import embedding_of
from llamarl.layout.boxes import Box
from llamarl.layout.mesh import Mesh, box_on
from llamarl.layout.model import check_shared, placement_of
from llamarl.model.experts import ExpertMLP
from llamarl.model.linear import ReplacedLinear
from llamarl.model.transformer import AllHeadsNorm, Block, BranchBlock, Transformer
from llamarl.model_spec import ModelSpec


@dataclass(frozen=True)
class TensorRank:
    """One of `count` ranks that share a model. Its experts lie whole on `expert` parts of them, and a part's ranks share the
    inner units of each."""

    rank: int = 0
    count: int = 1
    expert: int = 1

    def check(self, shape: ModelSpec) -> None:
        check_shared(shape, self.count, self.expert, "generator")

    def box(self, parameter: ParameterSpec) -> Box:
        """The part of a parameter that this rank holds. Only a vocabulary may leave the last rank a smaller one."""
        return box_on(self.rank, parameter.shape, placement_of(parameter), self._mesh)

    def counts(self, parameter: ParameterSpec) -> bool:
        """Whether this is the first rank that holds its part of a parameter: where it counts in sums over ranks."""
        if parameter.split is not None:
            return True
        return self._mesh.coordinate(self.rank, "etp" if parameter.by_expert else "tp") == 0

    def first_expert(self, experts: int) -> int:
        """Number of the first expert that this rank holds, of so many in a layer."""
        return self._mesh.coordinate(self.rank, "ep") * (experts // self.expert)

    @property
    def _mesh(self) -> Mesh:
        return Mesh((("tp", self.count),), self.expert)


class SummedLinear(ReplacedLinear):
    """A linear layer whose columns are spread over ranks; the product is the sum over them."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        dist.all_reduce(out)
        return out


class SplitEmbedding(nn.Embedding):
    """An embedding whose rows are spread over ranks. Each gives zeros for tokens of others; the sum is the embedding."""

    def __init__(self, part: nn.Embedding, first: int) -> None:
        super().__init__(1, 1, device="meta")
        self.weight, self._first = part.weight, first

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self._first
        mine = (local >= 0) & (local < len(self.weight))
        found = super().forward(torch.where(mine, local, 0)) * mine[..., None]
        dist.all_reduce(found)
        return found


def split_over_ranks(model: Transformer, part: TensorRank) -> None:
    """Turn a model loaded with `part.box` into one rank of the whole. Blocks may be split already."""
    if part.count == 1:
        return
    block: Any
    for block in model.model.layers:
        split_block(block, part)
    vocabulary = model.shape.vocab_size
    (first_row, _), _ = part.box(embedding_of(model.shape))
    model.model.embed_tokens = SplitEmbedding(model.model.embed_tokens, first_row)
    model.gather = lambda scores: gather_vocabulary(scores, vocabulary, part.count)


def split_block(block: Block | BranchBlock, part: TensorRank) -> None:
    """Let a block sum its two products over the ranks, and the squares of norms that span all heads."""
    if part.count > 1 and not isinstance(block.self_attn.o_proj, SummedLinear):
        block.self_attn.o_proj = SummedLinear(block.self_attn.o_proj)
        if isinstance(block.mlp, ExpertMLP):
            block.mlp.leave = _summed
            block.mlp.experts.first = part.first_expert(block.mlp.experts.count)
        else:
            block.mlp.down_proj = SummedLinear(block.mlp.down_proj)
        for norm in (block.self_attn.q_norm, block.self_attn.k_norm):
            if isinstance(norm, AllHeadsNorm):
                norm.sum_over_ranks = _summed


def _summed(part: Tensor) -> Tensor:
    dist.all_reduce(part)
    return part


def gather_vocabulary(scores: Tensor, vocabulary: int, count: int) -> Tensor:
    """Scores of the whole vocabulary, from the parts of all ranks."""
    each = -(-vocabulary // count)
    padded = F.pad(scores, (0, each - scores.shape[-1]))
    parts = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(parts, padded)
    return torch.cat(parts, dim=-1)[..., :vocabulary].contiguous()
