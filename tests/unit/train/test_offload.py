"""Activations in host memory change no number, leave the device, and are fetched before they are needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.lora import LORA, save_both
from helpers.models import lively_model
from helpers.training import CPU, cpu_learner, make_test_documents
from helpers.trees import make_branching_documents
from torch import Tensor

from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.train import offload
from llamarl.train.learner import Learner
from llamarl.train.offload import OffloadedBlock, moved_bytes
from llamarl.train.pinned import HostArena
from llamarl.train.policy import ComputeSettings, load_policy

DOCUMENTS = make_test_documents(12)


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also the small tensors of small models."""
    monkeypatch.setattr(offload.ActivationOffload.__init__, "__defaults__", (1,))
    yield


@pytest.mark.parametrize("how", [{}, {"tokens_per_pack": 60}, {"share_prompts": "on"}], ids=str)
def test_gradients_are_those_of_activations_that_stay(how: dict[str, object]) -> None:
    documents = make_branching_documents() if "share_prompts" in how else DOCUMENTS
    learners = [cpu_learner(recompute=recompute, **how) for recompute in ("selective", "offload")]  # type: ignore[arg-type]
    for _ in range(2):  # the second update takes the host memory of the first one again
        losses = [learner.accumulate(documents).loss() for learner in learners]
        plain, moved = (learner.optimizer.gradients() for learner in learners)
        assert losses[0] == losses[1]
        assert all(torch.equal(plain[name], moved[name]) for name in plain), "bit for bit"
    assert moved_bytes(learners[0].policy.model) is None
    assert (moved_bytes(learners[1].policy.model) or 0) > 100_000


@pytest.mark.usefixtures("traced_only")
def test_compiled_blocks_too() -> None:
    found = []
    for recompute in ("selective", "offload"):
        learner = cpu_learner(recompute=recompute, compiled=True, tokens_per_pack=60)
        learner.accumulate(DOCUMENTS)
        found.append(learner.optimizer.gradients())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert (moved_bytes(learner.policy.model) or 0) > 100_000


def test_adapters_too(tmp_path: object) -> None:
    save_both(tmp_path)  # type: ignore[arg-type]
    found = []
    for recompute in ("selective", "offload"):
        computing = ComputeSettings(CPU, torch.float32, recompute=recompute, lora=LORA)
        policy = load_policy(tmp_path / "model", computing, adapter=tmp_path / "adapter")  # type: ignore[operator]
        learner = Learner(policy, aipo_loss, settings=TrainerConfig(), algo=AlgoConfig(), updates=10)
        learner.accumulate(DOCUMENTS)
        found.append(learner.optimizer.gradients())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_numbers_that_are_lost_on_the_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward pass takes is what was fetched, not a tensor that stayed."""
    fetched = offload._Copies.bring

    def lossy(self: offload._Copies, host: Tensor) -> tuple[Tensor, None]:
        return fetched(self, host)[0] * 1.01, None

    monkeypatch.setattr(offload, "_AT_ONCE", 0)
    plain, moved = (cpu_learner(lively_model(), recompute=recompute) for recompute in ("selective", "offload"))
    plain.accumulate(DOCUMENTS)
    monkeypatch.setattr(offload._Copies, "bring", lossy)
    moved.accumulate(DOCUMENTS)
    expected, found = plain.optimizer.gradients(), moved.optimizer.gradients()
    assert not all(torch.allclose(found[name], expected[name], rtol=1e-4) for name in found)


def test_the_device_holds_a_few_blocks_only() -> None:
    """Sources of earlier blocks are let go during the forward pass; weights, rotary tables and masks never move."""
    learner = cpu_learner(recompute="offload")
    policy = learner.policy
    (pack,) = policy.packs(DOCUMENTS)
    hidden = policy.hidden(pack)
    block = policy.model.model.layers[0].forward
    assert isinstance(block, OffloadedBlock)
    kept = block.offload._blocks
    held = [sum(one._source is not None for one in list(layer._moved.values())) for layer in kept]
    assert not any(held[: -1 - offload._AT_ONCE]) and not kept[-1]._moved, "the last block's stay"
    shapes = {tuple(one._shape) for layer in kept for one in list(layer._moved.values())}
    weights = {tuple(parameter.shape) for parameter in policy.model.model.layers[0].parameters() if parameter.dim() > 1}
    assert shapes and not shapes & weights
    hidden.sum().backward()  # type: ignore[no-untyped-call]
    assert not any(len(layer._moved) for layer in kept), "what was used is gone"


def test_an_update_says_how_much_it_moved() -> None:
    learner = cpu_learner(recompute="offload")
    amounts = []
    for _ in range(2):
        learner.accumulate(DOCUMENTS)
        amounts.append(learner._offloaded_gib())
    assert amounts[0] is not None and amounts[0] > 0 and amounts[0] == amounts[1]
    assert cpu_learner()._offloaded_gib() is None


def test_host_memory_grows_to_what_a_pass_needs_and_is_taken_again() -> None:
    arena = HostArena("trainer.recompute", pinned=False, piece_bytes=1000)
    first = [arena.take(size) for size in (400, 500, 300, 2000)]
    for number, one in enumerate(first):
        one.fill_(number)
    assert [set(one.tolist()) for one in first] == [{0}, {1}, {2}, {3}], "pieces do not overlap"
    held = arena.num_bytes
    arena.reset()
    assert [arena.take(size).data_ptr() for size in (400, 500, 300, 2000)] == [one.data_ptr() for one in first]
    assert arena.num_bytes == held == 1000 + 1000 + 2048 - 2048 % 64
