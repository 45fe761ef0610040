"""Packs hold every document once, beside others and not mixed with them, as evenly as can be, with padding at tails only."""

from __future__ import annotations

import numpy as np
import torch
from helpers.training import make_test_documents
from hypothesis import given
from hypothesis import strategies as st

from llamarl.algo.batch import Document
from llamarl.train.balance import balance
from llamarl.train.packing import PADDING, Pack, make_packs

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths, st.integers(1, 80), st.integers(1, 4))
def test_every_item_lies_in_one_bin_and_no_bin_is_over_full(sizes: list[int], limit: int, multiple: int) -> None:
    bins = balance(sizes, limit, multiple)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert len(bins) % multiple == 0
    for items in bins:
        assert sum(sizes[item] for item in items) <= limit or len(items) == 1


@given(lengths, st.integers(2, 4))
def test_ranks_get_the_same_up_to_the_longest_item(sizes: list[int], ranks: int) -> None:
    fill = [sum(sizes[item] for item in items) for items in balance(sizes, 10_000, ranks)]
    assert max(fill) - min(fill) <= max(sizes)


def read_back(pack: Pack) -> dict[int, tuple[list[int], list[int], list[float], list[int]]]:
    """By document: its tokens, the places in it that predict, what they predict, and the staleness of that."""
    width = pack.tokens_RT.shape[1]
    found = {}
    for sequence in set(pack.sequence_N.tolist()):
        of_it = pack.sequence_N == sequence
        at = pack.at_N[of_it]
        row, number = int(at[0]) // width, int(pack.nodes_RT.flatten()[at[0]])
        inside = pack.nodes_RT[row] == number
        tokens, positions = pack.tokens_RT[row][inside].tolist(), pack.positions_RT[row][inside].tolist()
        assert positions == list(range(len(tokens))), "positions begin anew with every document"
        first = int(inside.nonzero()[0])
        predicting = (at - row * width - first).tolist()
        assert [tokens[one + 1] for one in predicting] == pack.targets_N[of_it].tolist()
        found[sequence] = (
            tokens,
            predicting,
            pack.behavior_logprobs_N[of_it].tolist(),
            pack.staleness_N[of_it].tolist(),
        )
    return found


def expected(documents: list[Document]) -> dict[int, tuple[list[int], list[int], list[float], list[int]]]:
    return {
        index: (
            document.tokens.tolist(),
            list(range(document.num_prompt_tokens - 1, len(document.tokens) - 1)),
            document.behavior_logprobs.tolist(),
            document.staleness.tolist(),
        )
        for index, document in enumerate(documents)
    }


@given(st.integers(1, 30), st.integers(16, 200), st.integers(1, 3), st.booleans())
def test_what_goes_in_can_be_read_back_from_the_packs_of_all_ranks(
    count: int, budget: int, ranks: int, long_rows: bool
) -> None:
    documents = make_test_documents(count, seed=count)
    packs = [make_packs(documents, budget, rank=rank, num_ranks=ranks, long_rows=long_rows) for rank in range(ranks)]
    assert len({len(mine) for mine in packs}) == 1, "ranks make equally many passes"
    found: dict[int, tuple[list[int], list[int], list[float], list[int]]] = {}
    for pack in (pack for mine in packs for pack in mine if pack.counts):
        here = read_back(pack)
        assert not here.keys() & found.keys()
        found |= here
    assert found == expected(documents)


@given(st.integers(1, 40), st.booleans())
def test_padding_is_at_the_tail_of_a_row_only_and_less_than_a_document_or_a_tile(count: int, long_rows: bool) -> None:
    documents = make_test_documents(count, seed=count)
    for pack in make_packs(documents, 10_000, long_rows=long_rows):
        padded_RT = pack.nodes_RT == PADDING
        assert (padded_RT.int().diff(dim=1) >= 0).all(), "nothing follows the padding"
        if long_rows:
            assert padded_RT.sum() < 128 and pack.tokens_RT.shape[0] == 1


def test_short_rows_of_a_usual_batch_are_nearly_full() -> None:
    """768 answers of about 12 to 20 tokens, as in the default job."""
    rng = np.random.default_rng(0)
    documents = [
        Document(np.zeros(size, np.int32), 6, zeros := np.zeros(size - 6, np.float32), zeros.astype(np.int64), zeros)
        for size in rng.integers(12, 21, 768)
    ]
    (pack,) = make_packs(documents, 16_384, long_rows=False)
    assert (pack.nodes_RT == PADDING).float().mean() < 0.12
    assert pack.tokens_RT.shape[1] <= 64


def test_a_document_longer_than_the_budget_is_a_pack_of_its_own() -> None:
    documents = make_test_documents(6)
    longest = max(len(document.tokens) for document in documents)
    packs = make_packs(documents, longest - 1, long_rows=False)
    assert all(len(pack.lengths) == 1 or sum(pack.lengths) < longest for pack in packs)


def test_a_rank_without_documents_goes_along_with_a_copy_that_counts_for_nothing() -> None:
    documents = make_test_documents(1)
    packs = [make_packs(documents, 100, rank=rank, num_ranks=2, long_rows=False)[0] for rank in range(2)]
    assert [pack.counts for pack in packs] == [True, False]
    assert torch.equal(packs[0].tokens_RT, packs[1].tokens_RT)
