"""Tensor parallelism inside a replica: every rank holds some heads, a part of the inner width and of the vocabulary.

Applied to the model from outside: the outputs of attention and MLP are summed over ranks, embeddings are looked up on the
rank that has them and summed, and the head's scores are gathered, so every rank draws the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from llamarl.errors import ConfigError
from llamarl.model.transformer import MLP, Attention, ProductLinear, Transformer
from llamarl.model_spec import ModelSpec

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class TensorRank:
    """One of `count` ranks that share a model."""

    rank: int = 0
    count: int = 1

    def check(self, shape: ModelSpec) -> None:
        for name, size in (("key-value heads", shape.num_kv_heads), ("inner width", shape.intermediate_size)):
            if size % self.count:
                raise ConfigError(
                    f"generator.tensor: {self.count} ranks cannot share the model's {name} ({size}) evenly"
                )

    def box(self, name: str, size: tuple[int, ...]) -> tuple[slice, ...]:
        """The shard of a parameter that this rank holds, as `load_model` takes it."""
        layer = name.split(".")[-2]
        if self.count == 1 or layer not in _BY_ROWS + _BY_COLUMNS:
            return tuple(slice(0, length) for length in size)
        cut = 1 if layer in _BY_COLUMNS else 0
        return tuple(self._part(length) if at == cut else slice(0, length) for at, length in enumerate(size))

    def _part(self, length: int) -> slice:
        """This rank's part of a dimension. Parts are equal; only of a vocabulary the last may be smaller."""
        each = -(-length // self.count)
        return slice(min(length, self.rank * each), min(length, (self.rank + 1) * each))


class SummedLinear(ProductLinear):
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
    """Turn a model loaded with `part.box` into one rank of the whole."""
    if part.count == 1:
        return
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.o_proj = SummedLinear(module.o_proj)
        elif isinstance(module, MLP):
            module.down_proj = SummedLinear(module.down_proj)
    vocabulary = model.shape.vocab_size
    rows, _ = part.box("model.embed_tokens.weight", (vocabulary, model.shape.hidden_size))
    model.model.embed_tokens = SplitEmbedding(model.model.embed_tokens, rows.start)
    model.gather = lambda scores: gather_vocabulary(scores, vocabulary, part.count)


def tell_all_ranks(part: TensorRank, data: bytes) -> bytes:
    """Broadcast the first rank's `data`; what other ranks pass is ignored. All ranks must call this together."""
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    told = torch.zeros(int(length.item()), dtype=torch.uint8)
    if part.rank == 0:
        told.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(told, src=0)
    return told.numpy().tobytes()


def gather_vocabulary(scores: Tensor, vocabulary: int, count: int) -> Tensor:
    """Scores of the whole vocabulary, from the parts of all ranks."""
    each = -(-vocabulary // count)
    padded = F.pad(scores, (0, each - scores.shape[-1]))
    parts = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(parts, padded)
    return torch.cat(parts, dim=-1)[..., :vocabulary].contiguous()
