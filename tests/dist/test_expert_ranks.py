"""Ranks that hold whole experts together compute what one rank computes: losses, gradients, updates, snapshots, samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.experts import SHAPE as MIXTURE
from helpers.faulty_ranks import generator_with_shifted_experts
from helpers.killing import TINY
from helpers.lora import merged_gradients, random_adapters, save_both
from helpers.meshes import Layout, assert_goes_on, chain, run_mesh
from helpers.models import lively_model
from helpers.ranks import run_ranks
from helpers.tensor_rank import check_adapted_ranks, check_same_tokens
from helpers.trainer_rank import DOCUMENTS, adapters, make_learner, routed, train, whole_masters
from helpers.training import assert_same_gradients, make_test_documents, naive_gradients
from msgspec.structs import replace
from torch import Tensor

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import JobFailed
from llamarl.model.checkpoint import save_model
from llamarl.model.transformer import Transformer
from llamarl.train.mesh import LONE_RANK

SHAPE = replace(MIXTURE, num_kv_heads=4)  # six experts in two of three layers; four ranks can share its heads
MESHES = {  # replicate, data, tensor, context, expert
    "tp=2,ep=2": (1, 1, 2, 1, 2),
    "fsdp=2,tp=2": (1, 2, 2),
    "fsdp=2,tp=2,ep=2": (1, 2, 2, 1, 2),  # three experts over two FSDP ranks
    "tp=4,ep=2": (1, 1, 4, 1, 2),
    "hsdp=2,tp=2,ep=2": (2, 1, 2, 1, 2),
}


def mixture() -> Transformer:
    return lively_model(shape=SHAPE)


def named(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))
def test_trainer_ranks_compute_what_one_computes(mesh: Layout, tmp_path: Path) -> None:
    """Gradients in one pass, in several and with recompute; with experts that are replayed; three updates; a snapshot."""
    for folder in (tmp_path, tmp_path / "alone"):
        save_model(mixture(), folder / "model")
    found = run_mesh("gradients,routed,updates", mesh, tmp_path)
    loss, expected = naive_gradients(mixture(), make_test_documents(DOCUMENTS))
    for case in ("one", "several", "full"):
        gradients = named(found["gradients"], f"{case}/")
        assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-5)
        assert_same_gradients(gradients, expected)
    alone = {name: value.detach() for name, value in routed(LONE_RANK, tmp_path / "alone").items()}
    assert alone["loss"].item() != pytest.approx(loss, abs=1e-3), "other experts, another loss"
    assert found["routed"].pop("loss").item() == pytest.approx(alone.pop("loss").item(), abs=1e-5)
    assert_same_gradients(found["routed"], alone)
    learner = make_learner(tmp_path / "alone" / "model", LONE_RANK)
    train(learner)
    masters, updates = whole_masters(learner), found["updates"]
    differs = torch.cat([(updates[name] - master).abs().flatten() > 1e-4 for name, master in masters.items()])
    assert differs.float().mean() < 1e-3, "where a gradient is nothing but rounding, Adam makes a whole step of it"
    assert updates["same"].item() == 1, "a snapshot is gone on from bit for bit"


def test_training_goes_on_from_mesh_to_mesh(tmp_path: Path) -> None:
    """Snapshots of expert ranks, read by others: weights and moments, bit for bit."""
    layouts: list[Layout] = [(1, 2, 2, 1, 2), (1, 1, 2), (1, 1, 2, 1, 2)]
    assert_goes_on(chain(layouts, tmp_path, model=mixture()), tmp_path, torch.device("cpu"))


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 2, 1, 2), (1, 1, 4, 1, 2)], ids=str)
def test_adapters_of_attention_and_experts_go_beside(mesh: Layout, tmp_path: Path) -> None:
    """Gradients of the merged model, the norm and the hash of one rank, snapshots that go on bit for bit."""
    for folder in (tmp_path, tmp_path / "alone"):
        save_both(folder, shape=SHAPE)
    found = run_mesh("adapters", mesh, tmp_path)["adapters"]
    alone = adapters(LONE_RANK, tmp_path / "alone")
    given = random_adapters(shape=SHAPE)
    loss, expected = merged_gradients(tmp_path / "adapter", make_test_documents(DOCUMENTS), given)
    for case in ("one", "several", "selective", "full"):
        gradients = named(found, f"{case}/")
        assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-5)
        assert_same_gradients(gradients, expected)
    assert found["grad_norm"].item() == pytest.approx(alone["grad_norm"].item(), rel=1e-3)
    assert torch.equal(found["hash"], alone["hash"]), "of the adapters that were read"
    assert found["same"].item() == 1, "a snapshot is gone on from bit for bit"


@pytest.mark.parametrize("lora", ["beside", "merged"])
def test_generator_ranks_sample_with_adapters_of_experts_what_the_merged_model_samples(
    lora: str, tmp_path: Path
) -> None:
    check_adapted_ranks(tmp_path, lora, 4, shape=SHAPE, expert=2)


@pytest.mark.timeout(900)  # compiling takes a minute, and longer beside others
def test_compiled_blocks_compute_the_same(tmp_path: Path) -> None:
    save_model(mixture(), tmp_path / "model")
    found = run_mesh("compiled", (1, 1, 2, 1, 2), tmp_path)["compiled"]
    _, expected = naive_gradients(mixture(), make_test_documents(DOCUMENTS))
    for recompute in ("none", "full"):
        assert_same_gradients(named(found, f"{recompute}/"), expected)


def test_a_trainer_rank_whose_experts_are_off_by_one_is_noticed(tmp_path: Path) -> None:
    save_model(mixture(), tmp_path / "model")
    found = run_mesh("off_by_one", (1, 1, 2, 1, 2), tmp_path)["off_by_one"]
    _, expected = naive_gradients(mixture(), make_test_documents(DOCUMENTS))
    with pytest.raises(AssertionError):
        assert_same_gradients(found, expected)


@pytest.mark.parametrize(("ranks", "expert"), [(2, 2), (4, 2)])
def test_generator_ranks_sample_what_one_samples(ranks: int, expert: int, tmp_path: Path) -> None:
    """And a rank whose experts are off by one does not."""
    save_model(mixture(), tmp_path / "model")
    run_ranks("helpers.tensor_rank", ranks, str(tmp_path), f"expert={expert}", "off_by_one")
    alone = check_same_tokens(tmp_path, ranks)
    wrong = json.loads((tmp_path / "off_by_one-0.json").read_text())
    assert wrong != json.loads(json.dumps(alone))


JOB = [
    *TINY,
    "model.path=tiny-moe",
    "generator.tensor=2",
    "generator.expert=2",
    "trainer.tensor=2",
    "schedule.updates=3",
    "schedule.probe_every=1",
    "evaluate.prompts=8",
    "trainer.lr=1e-3",
    "trainer.warmup_updates=0",
]


def test_a_job_with_expert_ranks_in_both_roles_goes_on_with_others(tmp_path: Path) -> None:
    """Weights reach every rank: probes agree, and the trainer would choose the experts that were recorded. Then the same run
    goes on with experts that are cut in the generator, and a trainer of one rank."""
    Job(load_config(None, [*JOB, "trainer.expert=2", "snapshots.every=1"])).run(tmp_path / "run")
    more = ["trainer.tensor=1", "trainer.expert=1", "generator.expert=1", "schedule.updates=5"]
    Job.resume(tmp_path / "run", overrides=more)
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = {row["update"]: row["logprob_gap"] for row in rows if "logprob_gap" in row}
    assert {0, 1, 2, 3, 4} <= gaps.keys()
    assert all(gap < 1e-5 for gap in gaps.values()), gaps
    assert all(row["probe_route_shortfall_max"] < 1e-3 for row in rows if "probe_route_shortfall_max" in row)


def test_a_job_whose_generator_has_experts_off_by_one_ends_with_the_reason(tmp_path: Path) -> None:
    """The probe notices: the trainer would take other experts in the layers behind the first."""
    job = Job(load_config(None, JOB), builders={"generator": generator_with_shifted_experts})
    with pytest.raises(JobFailed, match="would not take the experts that were recorded"):
        job.run(tmp_path / "run")
