"""A token sees its own document up to itself: nothing behind it, and nothing of its neighbors in the row."""

from __future__ import annotations

import torch
from helpers.models import lively_model
from helpers.training import make_test_documents

from llamarl.train.attention import FlashDocuments, MaskedDocuments
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
