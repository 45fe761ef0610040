"""Passes are compiled before the first batch; nothing of what is trained notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from helpers.models import lively_model
from helpers.training import cpu_learner, make_test_documents
from torch._dynamo.utils import counters

from llamarl.train import lm_head, optimizer, parallel
from llamarl.train.learner import Learner
from llamarl.train.warm_up import WarmUp

DOCUMENTS = make_test_documents(6)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced and differentiated as for a GPU, but run by plain PyTorch."""
    for module in (lm_head, optimizer, parallel):
        monkeypatch.setattr(module, "compile_backend", lambda: "aot_eager")
    lm_head._compiled.cache_clear()
    optimizer._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    lm_head._compiled.cache_clear()
    optimizer._compiled.cache_clear()
    torch._dynamo.reset()


def trained(learner: Learner) -> dict[str, torch.Tensor]:
    learner.step(0, learner.accumulate(DOCUMENTS).total_loss())
    return {name: value.clone() for name, value in learner.policy.model.named_parameters()}


def test_an_update_after_it_is_the_same_bit_for_bit() -> None:
    plain = cpu_learner(lively_model(), compiled=True)
    warm = cpu_learner(lively_model(), compiled=True)
    WarmUp(warm, 8, 8, probes=True)()
    assert not warm.optimizer.gradients()
    assert not warm.optimizer.state_tensors()
    for one, other in zip(trained(plain).values(), trained(warm).values(), strict=True):
        assert torch.equal(one, other)


def test_the_first_update_finds_everything_compiled() -> None:
    learner = cpu_learner(lively_model(), compiled=True)
    warm_up = WarmUp(learner, 8, 8)
    warm_up()
    made = counters["stats"]["unique_graphs"]
    assert made > 0
    # Rows of the same shape: with a CPU's masks, every other shape is compiled anew.
    learner.step(0, learner.accumulate(warm_up._documents(learner.policy.model.shape.vocab_size)).total_loss())
    assert counters["stats"]["unique_graphs"] == made


def test_the_step_of_bf16_weights_is_compiled_too() -> None:
    shapes = {"matrix": (8, 4), "other": (16, 4), "vector": (6,)}
    weights = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()}
    adamw = optimizer.AdamW(weights, cpu_learner(lively_model())._settings, compiled=True)
    adamw.warm_up()
    made = counters["stats"]["unique_graphs"]
    assert made == 4, "vectors and matrices, for gradients of one pass and for sums of several"
    assert all(bool((one == 1).all()) for one in weights.values())
    for one in weights.values():
        one.grad = torch.ones_like(one)
    assert adamw.step(1e-3)
    assert counters["stats"]["unique_graphs"] == made
