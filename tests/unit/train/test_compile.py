"""Compiled blocks compute the same, without a break, and a deeper model makes no further graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch._dynamo
from helpers.models import SHAPE, lively_model
from helpers.training import assert_same_gradients, cpu_learner, make_test_documents, naive_gradients
from msgspec.structs import replace
from torch._dynamo.utils import counters

from llamarl.train import lm_head

DOCUMENTS = make_test_documents(6)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced and differentiated as for a GPU, but run by plain PyTorch: no C++ compiler, and seconds instead of minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    lm_head._compiled.cache_clear()
    yield
    lm_head._compiled.cache_clear()
    torch._dynamo.reset()


def graphs(num_layers: int, recompute: str) -> int:
    torch._dynamo.reset()
    counters.clear()
    shape = replace(SHAPE, num_layers=num_layers)
    learner = cpu_learner(lively_model(shape=shape), compiled=True, recompute=recompute)
    learner.accumulate(DOCUMENTS)
    _, expected = naive_gradients(lively_model(shape=shape), DOCUMENTS)
    assert_same_gradients(learner.optimizer.gradients(), expected)
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_blocks_share_one_graph(recompute: str) -> None:
    assert graphs(2, recompute) == graphs(3, recompute)
