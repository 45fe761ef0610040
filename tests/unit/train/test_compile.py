"""Compiled blocks compute the same, without a break, and a deeper model makes no further graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch._dynamo
from helpers.experts import expert_model, with_routes
from helpers.lora import LORA, base_of, save_both
from helpers.models import SHAPE, lively_model
from helpers.odd_models import EXPERTS, ODD, odd_model
from helpers.training import CPU, assert_same_gradients, cpu_learner, make_test_documents, naive_gradients
from msgspec.structs import replace
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from llamarl.algo.batch import Document
from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.train import lm_head
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, load_policy

DOCUMENTS = make_test_documents(6)


pytestmark = pytest.mark.usefixtures("traced_only")


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


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_replay_experts(recompute: str) -> None:
    """On a CPU each block breaks at the products of its experts, whose sizes only the host knows."""
    torch._dynamo.reset()
    documents = [with_routes(one) for one in DOCUMENTS]
    plain, compiled = (
        cpu_learner(expert_model(), replay_routes=True, compiled=compiled, recompute=recompute)
        for compiled in (False, True)
    )
    for learner in (plain, compiled):
        learner.accumulate(documents)
    assert_same_gradients(compiled.optimizer.gradients(), plain.optimizer.gradients())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_all_blocks_share_one_graph(recompute: str) -> None:
    assert graphs(2, recompute) == graphs(3, recompute)


def test_the_kl_to_a_teacher_is_compiled_once_whatever_its_weight() -> None:
    """The weight follows from the number of tokens, which is another one in every update."""
    hidden, weight = torch.randn(40, 8).requires_grad_(), torch.randn(23, 8).requires_grad_()
    targets, states = torch.randint(23, (40,)), (torch.randn(40, 12), torch.randn(23, 12))
    found: list[int] = []
    for number in range(3):
        grads = []
        for compiled in (True, False):
            teacher = lm_head.TeacherStates(*states, 1 / (number + 3), 0.25)
            head = lm_head.Head(0.8, chunk=20, compiled=compiled)
            loss = lm_head.taught_loss(hidden, weight, targets, _mean_logprob, head, teacher)[0]
            grads.append(torch.autograd.grad(loss, (hidden, weight)))
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*grads, strict=True))
        found.append(int(counters["stats"]["unique_graphs"]))
    assert found[0] == found[-1] and not counters["graph_break"]


def _mean_logprob(part: slice, logprobs_n: torch.Tensor, entropy_n: torch.Tensor) -> torch.Tensor:
    return (logprobs_n.sum() + entropy_n.sum()) / 40


def test_layers_with_experts_share_a_graph() -> None:
    """Whoever is chosen, and however long the rows are."""
    found = []
    for num_layers in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        spec = replace(EXPERTS["olmoe"], num_layers=num_layers)
        learner = cpu_learner(odd_model(spec), compiled=True, tokens_per_pack=40)
        learner.accumulate(DOCUMENTS)
        _, expected = naive_gradients(odd_model(spec), DOCUMENTS)
        assert_same_gradients(learner.optimizer.gradients(), expected)
        assert not counters["graph_break"]
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1]


def kept_numbers(learner: Learner, documents: Sequence[Document] = DOCUMENTS) -> int:
    """How many numbers that are no weights passes keep for the backward pass."""
    model = learner.policy.model
    memory = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if (place := saved.untyped_storage().data_ptr()) not in memory and saved.dtype == torch.float32:
            kept[place] = saved.untyped_storage().nbytes() // 4
        return saved

    torch._dynamo.reset()
    with saved_tensors_hooks(keep, lambda saved: saved):
        learner.accumulate(documents)
    return sum(kept.values())


def beside_fp8(folder: Path, recompute: str) -> Learner:
    how = ComputeSettings(CPU, torch.float32, lora=LORA, recompute=recompute, compiled=True)
    policy = load_policy(folder / "model", how, adapter=folder / "adapter", base=base_of(folder / "model", "fp8"))
    return Learner(policy, aipo_loss, settings=TrainerConfig(), algo=AlgoConfig(), updates=10)


def test_blocks_beside_a_base_in_fp8_keep_only_what_they_must(tmp_path: Path) -> None:
    """With torch 2.11 they kept the result of every product, whatever `recompute` said: 36 GiB of a model of 70 billion."""
    save_both(tmp_path)
    everything, blocks = (kept_numbers(beside_fp8(tmp_path, recompute)) for recompute in ("none", "full"))
    assert 0 < blocks < everything / 4


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_with_experts_keep_one_result_for_each_expert_of_a_token(compiled: bool) -> None:
    """That of the first product, and a few numbers: no state, nothing that the activation made, no result of the second
    product. With blocks or MLPs that are computed again, nothing at all."""
    documents, layers, inner = DOCUMENTS[:1], 3, 24
    spec = replace(EXPERTS["olmoe"], num_layers=layers, experts=8, expert_size=inner)
    tokens, few = len(documents[0].tokens) - 1, 6
    for recompute in ("none", "selective", "full"):
        found = []
        for k in (2, 6):
            model = odd_model(replace(spec, experts_per_token=k))
            learner = cpu_learner(model, compiled=compiled, recompute=recompute)
            found.append(kept_numbers(learner, documents) / tokens / layers)
        each = (found[1] - found[0]) / 4
        least = 2 * inner if recompute == "none" else 0
        assert least <= each < least + few, recompute
        assert few < min(inner, spec.hidden_size)
