"""A token sees its own document up to itself: nothing behind it, and nothing of its neighbors in the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.models import lively_model
from helpers.training import make_test_documents
from torch.nn.attention import SDPBackend

from llamarl.algo.batch import Document
from llamarl.train import attention as attention_module
from llamarl.train.attention import CudnnDocuments, FlashDocuments, MaskedDocuments, document_attention
from llamarl.train.packing import make_packs

DOCUMENTS = make_test_documents(9)


def test_changing_one_document_changes_no_other() -> None:
    model = lively_model()
    (pack,) = make_packs(DOCUMENTS, 10_000, long_rows=False)
    with torch.no_grad():
        before = model(pack.tokens_RT, pack.positions_RT, MaskedDocuments(pack))
        changed_RT = pack.nodes_RT == 4
        tokens_RT = torch.where(changed_RT, (pack.tokens_RT + 1) % 23, pack.tokens_RT)
        after = model(tokens_RT, pack.positions_RT, MaskedDocuments(pack))
    assert torch.equal(before[~changed_RT], after[~changed_RT])
    assert not torch.isclose(before[changed_RT], after[changed_RT]).all()


def test_the_long_row_is_cut_where_documents_begin() -> None:
    (pack,) = make_packs(DOCUMENTS, 10_000, long_rows=True)
    attention = FlashDocuments(pack)
    starts, width = attention.starts_D.tolist(), pack.tokens_RT.numel()
    ends = [sum(pack.lengths[: index + 1]) for index in range(len(pack.lengths))]
    assert starts[: len(ends) + 2] == [0, *ends, width]
    assert set(starts[len(ends) + 2 :]) <= {width}
    assert attention.longest >= max(pack.lengths)


def document(length: int, seed: int) -> Document:
    tokens, zeros = np.random.default_rng(seed).integers(0, 23, length), np.zeros(length - 1, np.float32)
    return Document(tokens.astype(np.int32), 1, zeros, zeros.astype(np.int64), zeros)


@pytest.mark.parametrize(("lengths", "multiple"), [([50], 16), ([32], 32), ([24, 24, 24], 24)])
def test_documents_of_one_length_are_a_batch_for_cudnn(
    lengths: list[int], multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any of torch's implementations: hidden states and gradients are those of the mask, also beside padding."""
    monkeypatch.setattr(attention_module, "CUDNN", SDPBackend.MATH)
    documents = [document(length, number) for number, length in enumerate(lengths)]
    (pack,) = make_packs(documents, 10_000, long_rows=True, multiple_of=multiple)
    how = document_attention(pack, long_rows=True, cudnn_from=24)
    assert isinstance(how, CudnnDocuments)
    found = []
    for attend in (how, MaskedDocuments(pack)):
        model = lively_model()
        hidden = model(pack.tokens_RT, pack.positions_RT, attend).flatten(0, 1)[pack.at_N]
        hidden.square().sum().backward()
        found.append([hidden, *(one.grad for one in model.parameters() if one.grad is not None)])
    assert all(torch.allclose(mine, other, rtol=1e-4, atol=1e-4) for mine, other in zip(*found, strict=True))


@pytest.mark.parametrize(("lengths", "cudnn_from"), [([24, 23], 1), ([24, 24], 25), ([24, 24], 0), ([20, 20], 1)])
def test_other_documents_are_not(lengths: list[int], cudnn_from: int) -> None:
    """Of several lengths, too short, not wanted, or beside padding."""
    documents = [document(length, number) for number, length in enumerate(lengths)]
    (pack,) = make_packs(documents, 10_000, long_rows=True, multiple_of=24)
    assert isinstance(document_attention(pack, long_rows=True, cudnn_from=cudnn_from), FlashDocuments)
