"""Ranks together compute what one rank computes: losses, gradients, norms, updates and snapshots, on every mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.meshes import Layout, assert_noticed, run_mesh
from helpers.models import SHAPE, lively_model
from helpers.trainer_rank import DOCUMENTS, critic, make_learner, sequence_loss, train, whole_masters
from helpers.training import assert_same_gradients, cpu_learner, make_test_documents, naive_gradients
from helpers.trees import make_branching_documents
from msgspec.structs import replace
from torch import Tensor

from llamarl.model.checkpoint import save_model
from llamarl.train.mesh import LONE_RANK
from llamarl.train.token_column import TokenColumn

TIED = replace(SHAPE, tied_head=True, qk_norm=True)
MESHES = {  # replicate, data, tensor, context
    "fsdp=4": (1, 4, 1),
    "tp=2": (1, 1, 2),
    "fsdp=2,tp=2": (1, 2, 2),
    "hsdp=2": (2, 1, 1),
    "hsdp=2,fsdp=2": (2, 2, 1),
    "hsdp=2,tp=2": (2, 1, 2),
    "context=2,tp=2": (1, 1, 2, 2),
    "hsdp=2,context=2": (2, 1, 1, 2),
}
Found = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module", params=list(MESHES.values()), ids=list(MESHES))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    save_model(lively_model(), folder / "model")
    found = run_mesh("gradients,sequence_loss,updates,narrow", request.param, folder)
    return {**found, "mesh": {"shards": torch.tensor(request.param[1:])}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    save_model(lively_model(), folder / "model")
    return folder


def named(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize("case", ["one", "several", "full"])
def test_gradients_equal_one_rank_one_document_at_a_time(found: Found, case: str) -> None:
    """In one pass, in several, and with every block computed twice."""
    loss, expected = naive_gradients(lively_model(), make_test_documents(DOCUMENTS))
    gradients = named(found["gradients"], f"{case}/")
    assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(gradients, expected)


def test_compiled_blocks_of_tensor_ranks_compute_the_same(tmp_path: Path) -> None:
    """Over passes of several lengths, also with whole blocks computed twice."""
    save_model(lively_model(), tmp_path / "model")
    found = run_mesh("compiled", (1, 1, 2), tmp_path)["compiled"]
    _, expected = naive_gradients(lively_model(), make_test_documents(DOCUMENTS))
    for recompute in ("none", "full"):
        assert_same_gradients(named(found, f"{recompute}/"), expected)


@pytest.mark.parametrize("mesh", [(1, 2, 2), (1, 1, 1, 2)], ids=["fsdp=2,tp=2", "context=2"])
def test_a_critic_of_several_ranks_does_what_one_does(mesh: Layout, tmp_path: Path) -> None:
    """A head of one row: its gradients, updates and snapshots."""
    for folder in (tmp_path, tmp_path / "alone"):
        save_model(lively_model(shape=replace(SHAPE, value_head=True)), folder / "value")
    found, expected = run_mesh("critic", mesh, tmp_path)["critic"], critic(LONE_RANK, tmp_path / "alone")
    assert found["loss"].item() == pytest.approx(expected["loss"].item(), abs=1e-5)
    assert_same_gradients(named(found, "gradient/"), named(expected, "gradient/"))
    for name, weight in named(expected, "straight/").items():
        # Adam makes much of what rounding does to the smallest gradients; the learning rate is 1e-2.
        assert torch.allclose(found[f"straight/{name}"], weight, atol=1e-3), name
        assert torch.equal(found[f"resumed/{name}"], found[f"straight/{name}"]), name


def test_ranks_without_a_document_of_their_own_add_nothing(found: Found) -> None:
    _, expected = naive_gradients(lively_model(), make_test_documents(DOCUMENTS)[:1])
    assert_same_gradients(named(found["gradients"], "lonely/"), expected)


def test_metrics_are_those_of_the_whole_update(found: Found) -> None:
    documents = make_test_documents(DOCUMENTS)
    expected = cpu_learner().accumulate(documents).metrics(documents, 4.0)
    metrics = {name: value.item() for name, value in named(found["gradients"], "metric/").items()}
    assert metrics == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mesh", [(1, 2, 2), (1, 3, 1)], ids=["fsdp=2,tp=2", "fsdp=3"])
def test_shared_prompts_change_nothing_on_any_mesh(mesh: Layout, tmp_path: Path) -> None:
    """Gradients and metrics are those of one rank with one document at a time; each case shares tokens."""
    save_model(lively_model(), tmp_path / "model")
    found, documents = run_mesh("trees", mesh, tmp_path)["trees"], make_branching_documents()
    learner = cpu_learner()
    seen = learner.accumulate(documents)
    for case in ("one", "several", "full"):
        gradients = named(found, f"{case}/")
        assert gradients.pop("loss").item() == pytest.approx(seen.loss(), abs=1e-5)
        assert gradients.pop("shared_tokens").item() > 30
        assert_same_gradients(gradients, learner.optimizer.gradients())
    metrics = {name: value.item() for name, value in named(found, "metric/").items()}
    assert metrics == pytest.approx(seen.metrics(documents, 4.0), rel=1e-4, abs=1e-5)
    column = TokenColumn(documents, learner.policy)
    for pack in learner.policy.packs(documents):
        column.fill(pack.places, learner.policy.logprobs(pack))
    expected = [torch.frombuffer(bytearray(one), dtype=torch.float32) for one in column.complete()]
    assert torch.allclose(found["logprobs"], torch.cat(expected), atol=1e-5)


def test_a_loss_of_whole_answers_with_all_its_terms_equals_one_rank(found: Found, model: Path) -> None:
    expected = {name: value.detach() for name, value in sequence_loss(LONE_RANK, model).items()}
    gradients = dict(found["sequence_loss"])
    assert gradients.pop("loss").item() == pytest.approx(expected.pop("loss").item(), rel=1e-5)
    assert_same_gradients(gradients, expected)


def test_updates_equal_those_of_one_rank(found: Found, model: Path) -> None:
    """Three of them, with the norm of all ranks' gradients clipped each time. Where a gradient is nothing but rounding, Adam
    makes a whole step of it, so a few weights in ten thousand may differ."""
    learner = make_learner(model / "model", LONE_RANK)
    metrics = train(learner)
    masters = whole_masters(learner)
    differs = torch.cat([(found["updates"][name] - master).abs().flatten() > 1e-4 for name, master in masters.items()])
    assert differs.float().mean() < 5e-4
    assert found["updates"]["grad_norm"].item() == pytest.approx(metrics["grad_norm"], rel=1e-3)


def test_a_snapshot_of_all_ranks_is_gone_on_from_bit_for_bit(found: Found) -> None:
    assert found["updates"]["same"].item() == 1
    ranks = int(found["mesh"]["shards"].prod())
    assert found["updates"]["files"].item() == ranks + 3, "every rank of one replica has written its own part"


def test_a_rank_holds_its_share_and_no_more(found: Found) -> None:
    whole = sum(parameter.numel() for parameter in lively_model().parameters())
    share = found["updates"]["held"].item() / whole
    assert share == pytest.approx(1 / int(found["mesh"]["shards"].prod()), rel=0.1)


def test_narrow_passes_keep_fp32_masters(found: Found, model: Path) -> None:
    """bf16 passes go where fp32 passes go, as far as bf16 can tell."""
    learner = make_learner(model / "model", LONE_RANK)
    start = whole_masters(learner)
    train(learner)
    for name, master in whole_masters(learner).items():
        moved, expected = found["narrow"][name] - start[name], master - start[name]
        agreement = torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0)
        assert agreement > 0.8, name


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 1, 2)])
def test_tied_heads_and_head_norms_survive_tensor_parallelism(mesh: Layout, tmp_path: Path) -> None:
    save_model(lively_model(shape=TIED), tmp_path / "model")
    gradients = named(run_mesh("gradients", mesh, tmp_path)["gradients"], "several/")
    loss, expected = naive_gradients(lively_model(shape=TIED), make_test_documents(DOCUMENTS))
    assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(gradients, expected)


def test_replicas_that_drift_apart_are_noticed(tmp_path: Path) -> None:
    """If their gradients were never summed, or if one bit of a moment is wrong: at the next snapshot, in one line."""
    save_model(lively_model(), tmp_path / "model")
    assert_noticed(run_mesh("apart", (2, 1, 1), tmp_path)["apart"])
