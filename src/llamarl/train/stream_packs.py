"""Packs of an update whose documents are in different streams: all documents of a pack are in the same ones, so no pass
needs masks, and a teacher sees only what it teaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from llamarl.algo.batch import Document
from llamarl.train.packing import Pack
from llamarl.train.policy import Policy


def stream_packs(policy: Policy, documents: Sequence[Document], chosen: Sequence[int] | None = None) -> list[Pack]:
    """This rank's packs of all documents, or of those with the `chosen` numbers. Every rank has packs of the same streams in
    the same order."""
    among = range(len(documents)) if chosen is None else chosen
    kinds = list(dict.fromkeys(documents[number].streams for number in among))
    if len(kinds) == 1 and chosen is None:
        return policy.packs(documents)
    packs: list[Pack] = []
    for kind in kinds:
        numbers = [number for number in among if documents[number].streams == kind]
        of_document = torch.tensor(numbers)
        packs += [
            replace(pack, sequence_N=of_document[pack.sequence_N])
            for pack in policy.packs([documents[number] for number in numbers])
        ]
    return packs
