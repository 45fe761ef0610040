"""One value for each sampled token of an update's documents, filled in by the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.algo.batch import Document
from llamarl.train.packing import AnswerPlaces
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

    def fill(self, places: AnswerPlaces, values_N: Tensor) -> None:
        """Take the values of a pack's tokens."""
        sequence_N, within_N = places
        if self._only is not None:
            here_N = self._only.to(sequence_N.device)[sequence_N]
            sequence_N, within_N, values_N = sequence_N[here_N], within_N[here_N], values_N[here_N]
        self._values_N[self._starts[sequence_N.cpu()] + within_N.cpu()] = values_N.cpu().float()

    def complete(self, *, same_everywhere: bool = False) -> list[bytes]:
        """The values of each document, as fp32 bytes; a collective, after which every rank has those of all ranks. With
        `same_everywhere`, each part of the mesh that shares packs has computed all documents."""
        mesh = self._how.mesh
        if (mesh.context if same_everywhere else mesh.token_ranks) > 1:
            # Each rank has filled its own tokens, and the others are zero.
            total = mesh.sum_over_context if same_everywhere else mesh.sum_over_batch
            self._values_N.copy_(total(self._values_N.to(self._how.device)))
        return [one.numpy().astype("<f4").tobytes() for one in torch.split(self._values_N, self._lengths)]
