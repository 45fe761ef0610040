"""Shares of a pack: every token and answer token on one rank, equal work, and attention that is that of the whole pack."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.trees import flash_on_cpu, make_branching_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llamarl.algo.batch import Document
from llamarl.train import context_attention
from llamarl.train.attention import MaskedDocuments
from llamarl.train.context import CHUNKS, take_share
from llamarl.train.context_attention import FlashContext, MaskedContext
from llamarl.train.packing import PADDING, Pack, Sharing, make_packs

sizes = (st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["off", "on"]), st.integers(0, 99))


def row_of(documents: list[Document], ranks: int, sharing: str) -> Pack:
    (pack,) = make_packs(documents, 10_000, long_rows=True, multiple_of=CHUNKS * ranks, sharing=Sharing(sharing))
    return pack


@given(*sizes)
def test_every_token_and_every_answer_token_is_on_one_rank(
    groups: int, samples: int, ranks: int, sharing: str, seed: int
) -> None:
    pack = row_of(make_branching_documents(groups, samples, seed), ranks, sharing)
    shares = [take_share(pack, ranks, rank) for rank in range(ranks)]
    assert len({share.tokens_RT.shape for share in shares}) == 1, "all ranks compute equally much"
    seen, answers = list[int](), list[tuple[int, int, int, int]]()
    for share in shares:
        assert share.share is not None and share.is_work
        row = share.share.rows[share.share.rank]
        seen += row.tolist()
        for name in ("tokens_RT", "positions_RT", "nodes_RT"):
            assert torch.equal(getattr(share, name)[0], getattr(pack, name)[0][torch.from_numpy(row)])
        if share.counts:
            at = row[share.at_N.numpy()]
            answers += zip(at.tolist(), share.targets_N.tolist(), *(one.tolist() for one in share.places), strict=True)
        assert share.num_targets > 0, "every rank has a part in the loss"
    assert sorted(seen) == list(range(pack.tokens_RT.numel()))
    expected = zip(*(one.tolist() for one in (pack.at_N, pack.targets_N, *pack.places)), strict=True)
    assert sorted(answers) == sorted(expected)
    assert sum(node.squares for share in shares for node in share.nodes) == sum(node.squares for node in pack.nodes)
    assert sum(node.length for share in shares for node in share.nodes) == (pack.nodes_RT != PADDING).sum()


def document(length: int) -> Document:
    zeros = np.zeros(length - 1, np.float32)
    return Document(np.arange(length, dtype=np.int32), 1, zeros, zeros.astype(np.int64), zeros)


@pytest.mark.parametrize("lengths", [[4096], [2048, 2048], [3000, 400, 300, 200, 196], [64] * 64])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_about_the_same_pairs_in_attention(lengths: list[int], ranks: int) -> None:
    pack = row_of([document(length) for length in lengths], ranks, "off")
    work = [sum(node.squares for node in take_share(pack, ranks, rank).nodes) for rank in range(ranks)]
    assert max(work) < 1.25 * sum(work) / ranks
    if len(lengths) == 1:
        assert max(work) == min(work), "the first chunk goes with the last one"


def attend(how: object, given: list[Tensor], top: Tensor) -> list[Tensor]:
    given = [one.clone().requires_grad_() for one in given]
    out = how(0, *given)  # type: ignore[operator]
    return [out, *torch.autograd.grad((out * top).sum(), given)]


@settings(deadline=None)
@given(*sizes)
@pytest.mark.parametrize("kind", [FlashContext, MaskedContext])
def test_attention_of_all_shares_is_that_of_the_whole_pack(
    kind: type[FlashContext | MaskedContext], groups: int, samples: int, ranks: int, sharing: str, seed: int
) -> None:
    """With queries of one rank at a time: outputs, and the sum of the gradients that all ranks have of keys and values."""
    pack = row_of(make_branching_documents(groups, samples, seed), ranks, sharing)
    torch.manual_seed(seed)
    whole = [torch.randn(1, pack.tokens_RT.numel(), heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    top = torch.randn_like(whole[0]) * (pack.nodes_RT != PADDING)[..., None, None]
    expected = attend(MaskedDocuments(pack), whole, top)
    found = [torch.zeros_like(one) for one in expected]
    for rank in range(ranks):
        share = take_share(pack, ranks, rank)
        assert share.share is not None
        mine, order = (torch.from_numpy(one) for one in (share.share.rows[rank], share.share.gathered))
        totals = list[Tensor]()

        def scatter(total: Tensor, *_: object, totals: list[Tensor] = totals) -> Tensor:
            totals.append(total.double())
            return total[: len(total) // ranks]

        gathered = torch.cat([one[0][order] for one in whole[1:]], 1)
        with (
            flash_on_cpu(),
            patch.object(context_attention, "gather", lambda *_, gathered=gathered: gathered.clone()),
            patch.object(context_attention, "scatter_sum", scatter),
        ):
            out, of_q, *_ = attend(kind(share, share.share, "group"), [one[:, mine] for one in whole], top[:, mine])
        found[0][:, mine], found[1][:, mine] = out, of_q
        for total, of_part in zip(found[2:], totals[0].chunk(2, dim=1), strict=True):
            total[0][order] += of_part
    real = (pack.nodes_RT != PADDING)[..., None, None]
    assert torch.allclose(found[0] * real, expected[0] * real, atol=1e-9)
    for mine, one in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(mine, one, atol=1e-5)  # gradients of keys and values are summed in fp32
