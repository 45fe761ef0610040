"""Passes are compiled before the first batch; nothing of what is trained notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.models import VOCABULARY, lively_model
from helpers.training import cpu_learner, make_test_documents
from helpers.trees import flash_on_cpu, make_branching_documents
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import check_cacheable

from llamarl.train import compiler, warm_up
from llamarl.train.learner import Learner
from llamarl.train.mesh import LONE_RANK
from llamarl.train.optimizer import AdamW
from llamarl.train.packing import Sharing, make_packs
from llamarl.train.policy import ComputeSettings
from llamarl.train.warm_up import WarmUp, _document

DOCUMENTS = make_test_documents(6)


pytestmark = pytest.mark.usefixtures("traced_only")


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
    warm = WarmUp(learner, 8, 8)
    warm()
    made = counters["stats"]["unique_graphs"]
    assert made > 0
    # Rows of the same shape: with a CPU's masks, every other shape is compiled anew.
    learner.step(0, learner.accumulate(warm._documents(learner.policy.model.shape.vocab_size)).total_loss())
    assert counters["stats"]["unique_graphs"] == made


@pytest.mark.parametrize(("prompts", "compiled_later"), [(warm_up._PROMPTS, 0), (1, 1)])
def test_the_first_update_finds_what_trees_need(
    prompts: int, compiled_later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes a number that is 1 for a constant: a graph of one prompt alone would not serve several."""
    monkeypatch.setattr(warm_up, "_PROMPTS", prompts)
    monkeypatch.setattr(ComputeSettings, "long_rows", property(lambda _: True))
    learner = cpu_learner(lively_model(), compiled=True, share_prompts="on")
    documents = [
        _document(100 + 10 * group, 20 + one, (group, one), VOCABULARY, None) for group in range(6) for one in range(8)
    ]
    with flash_on_cpu():
        WarmUp(learner, 384, 512, probes=True, samples=8)()
        made = counters["stats"]["unique_graphs"]
        assert {level for pack in learner.policy.packs(documents) for level in pack.levels} == {0, 1}
        learner.step(0, learner.accumulate(documents).total_loss())
    assert counters["stats"]["unique_graphs"] - made == compiled_later


@pytest.mark.parametrize("asked", [True, False])
def test_what_is_compiled_for_trees_is_kept_between_starts(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a graph with an autograd function of our own only if asked; otherwise every start computes it anew."""

    def checked(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        check_cacheable(graph)
        return graph.forward

    monkeypatch.setattr(compiler, "compile_backend", lambda: checked)
    monkeypatch.setattr(ComputeSettings, "long_rows", property(lambda _: True))
    with functorch_config.patch(autograd_cache_allow_custom_autograd_functions=False):
        learner = cpu_learner(lively_model(), compiled=True, share_prompts="on")
        if not asked:
            functorch_config.autograd_cache_allow_custom_autograd_functions = False
        with flash_on_cpu(), nullcontext() if asked else pytest.raises(Exception, match="BypassAOTAutogradCache"):
            learner.accumulate(make_branching_documents(3, 4))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("samples", "max_prompt", "levels"), [(8, 512, {0, 1}), (1, 512, {0}), (8, 40, {0})])
def test_what_it_compiles_is_what_packs_of_a_job_are(
    num_ranks: int, samples: int, max_prompt: int, levels: set[int]
) -> None:
    """With shared prompts, trees of prompts and their answers on every rank: other levels would be another graph."""
    learner = cpu_learner(lively_model())
    sharing, mesh = Sharing("auto", least=32, join=0.01, square=1e-6), replace(LONE_RANK, data=num_ranks)
    learner.policy.computing = replace(learner.policy.computing, mesh=mesh)
    documents = WarmUp(learner, max_prompt, 512, samples=samples)._documents(1000)
    for rank in range(num_ranks):
        for how, expected in ((sharing, levels), (Sharing("off"), {0})):
            packs = make_packs(documents, 16_384, rank=rank, num_ranks=num_ranks, long_rows=True, sharing=how)
            assert packs and all(set(pack.levels) == expected for pack in packs)


def test_the_step_of_bf16_weights_is_compiled_too() -> None:
    shapes = {"matrix": (8, 4), "other": (16, 4), "vector": (6,)}
    weights = {name: torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()}
    adamw = AdamW(weights, cpu_learner(lively_model())._settings, compiled=True)
    adamw.warm_up()
    made = counters["stats"]["unique_graphs"]
    assert made == 2, "for gradients of one pass and for sums of several; one graph serves vectors and matrices"
    assert all(bool((one == 1).all()) for one in weights.values())
    for one in weights.values():
        one.grad = torch.ones_like(one)
    assert adamw.step(1e-3)
    assert counters["stats"]["unique_graphs"] == made


def test_a_weight_of_one_number_does_not_stand_for_all() -> None:
    weights = {
        name: torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for name, size in (("one", 1), ("row", 6))
    }
    adamw = AdamW(weights, cpu_learner(lively_model())._settings, compiled=True)
    adamw.warm_up()
    made = counters["stats"]["unique_graphs"]
    weights["row"].grad = torch.ones(6, dtype=torch.bfloat16)
    assert adamw.step(1e-3)
    assert counters["stats"]["unique_graphs"] == made
