"""One value for each sampled token of an update's documents, filled in by the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.algo.batch import Document
from llamarl.train.policy import Policy


class TokenColumn:
    """Collects values of documents from the packs in which they were computed. With `only`, just of these documents."""

    def __init__(self, documents: Sequence[Document], policy: Policy, only: Sequence[bool] | None = None) -> None:
        self._how = policy.computing
        self._only = None if only is None else torch.tensor(only)
        chosen = [True] * len(documents) if only is None else only
        self._lengths = [one.num_answer_tokens if kept else 0 for one, kept in zip(documents, chosen, strict=True)]
        self._starts = torch.tensor([0, *self._lengths]).cumsum(0)
        self._values_N = torch.zeros(sum(self._lengths), dtype=torch.float32)

    def fill(self, sequence_N: Tensor, values_N: Tensor) -> None:
        """Take the values of a pack's tokens; `sequence_N` is the document of each."""
        if self._only is not None:
            here_N = self._only.to(sequence_N.device)[sequence_N]
            sequence_N, values_N = sequence_N[here_N], values_N[here_N]
        sequence_N = sequence_N.cpu()
        _, counts = torch.unique_consecutive(
            sequence_N, return_counts=True
        )  # a pack keeps a document's tokens together
        first_N = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        within_N = torch.arange(len(sequence_N)) - first_N
        self._values_N[self._starts[sequence_N] + within_N] = values_N.cpu().float()

    def complete(self) -> list[bytes]:
        """The values of each document, as fp32 bytes; a collective, after which every rank has those of all ranks."""
        if self._how.mesh.batch_ranks > 1:  # each rank has filled its own tokens, and the others are zero
            self._values_N.copy_(self._how.mesh.sum_over_batch(self._values_N.to(self._how.device)))
        return [one.numpy().astype("<f4").tobytes() for one in torch.split(self._values_N, self._lengths)]
