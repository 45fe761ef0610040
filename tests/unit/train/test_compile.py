"""Compiled blocks compute the same, without a break, and a deeper model makes no further graphs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch._dynamo
from helpers.models import SHAPE, lively_model
from helpers.odd_models import ODD, odd_model
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


def test_blocks_of_each_kind_share_a_graph() -> None:
    """Layers with and without a window are of two kinds, however many there are."""
    found = []
    for num_layers in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        spec = replace(ODD["olmo3"], num_layers=num_layers, windows=ODD["olmo3"].windows * (num_layers // 2))
        learner = cpu_learner(odd_model(spec), compiled=True)
        learner.accumulate(DOCUMENTS)
        _, expected = naive_gradients(odd_model(spec), DOCUMENTS)
        assert_same_gradients(learner.optimizer.gradients(), expected)
        assert not counters["graph_break"]
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_blocks_share_one_graph(recompute: str) -> None:
    assert graphs(2, recompute) == graphs(3, recompute)
