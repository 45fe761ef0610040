"""Several NCCL ranks on one GPU compute what one rank computes, and their weights reach generators of several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.faulty_ranks import SKIPPED_ONCE, generator_with_a_wrong_slice, skipping_generator
from helpers.meshes import Layout, assert_goes_on, assert_noticed, chain, run_mesh
from helpers.models import SHAPE, lively_model
from helpers.probes import logprob_gaps
from helpers.ranks import run_ranks
from helpers.tensor_rank import check_same_tokens
from helpers.trainer_rank import DOCUMENTS, NARROW_CASES, make_learner, train, whole_masters
from helpers.training import assert_same_gradients, cpu_learner, make_test_documents, naive_gradients
from helpers.trees import make_branching_documents
from msgspec.structs import replace
from safetensors.torch import load_file

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model_spec import ModelSpec
from llamarl.observe.event_log import event_file, read_events
from llamarl.train.mesh import LONE_RANK

GPU = torch.device("cuda", 0)
FOUR_KV_HEADS = replace(SHAPE, hidden_size=128, intermediate_size=192, num_heads=8, num_kv_heads=4, head_dim=16)
SMALL = [
    "engine.share_gpus=true",
    "engine.start_s=120",
    "schedule.updates=6",
    "schedule.groups_per_update=8",
    "schedule.samples_per_group=4",
    "schedule.probe_every=2",
    "generator.slots=64",
    "evaluate.prompts=0",
    "snapshots.every=2",
    "trainer.compile='off'",
    "trainer.data=2",
    "trainer.tensor=2",
    "generator.tensor=2",
]
EXACT = ["generator.dtype=float32", "trainer.dtype=float32"]


@pytest.mark.parametrize(
    "mesh", [(1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2)]
)
def test_a_trainer_over_nccl_computes_what_one_rank_computes(mesh: Layout, tmp_path: Path) -> None:
    save_model(lively_model(), tmp_path / "model")
    by_task = run_mesh("gradients,updates", mesh, tmp_path, device="cuda:0")
    loss, expected = naive_gradients(lively_model(), make_test_documents(DOCUMENTS))
    found, updates = by_task["gradients"], by_task["updates"]
    for case in ("one", "several", "full"):
        gradients = {
            name.removeprefix(f"{case}/"): value for name, value in found.items() if name.startswith(f"{case}/")
        }
        assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-4)
        assert_same_gradients(gradients, expected)
    assert updates["same"].item() == 1, "a snapshot is gone on from bit for bit"
    learner = make_learner(tmp_path / "model", LONE_RANK, device=GPU)
    train(learner)
    differs = [(updates[name] - master.cpu()).abs().flatten() > 1e-4 for name, master in whole_masters(learner).items()]
    assert torch.cat(differs).float().mean() < 2e-3


CALM = ModelSpec(
    vocab_size=23,
    hidden_size=128,
    intermediate_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=1024,
)


@pytest.mark.parametrize("mesh", [(1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)])
def test_ranks_over_nccl_that_share_narrow_packs(mesh: Layout, tmp_path: Path) -> None:
    """Documents and trees by FlashAttention, compiled or not: gradients of one rank in fp32, up to bf16's rounding."""
    model = random_model(CALM)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    save_model(model, tmp_path / "model")
    learner, documents = cpu_learner(model), make_branching_documents(8, 6, longest=40)
    loss, expected = learner.accumulate(documents).loss(), learner.optimizer.gradients()
    found = run_mesh("narrow_packs", mesh, tmp_path, device="cuda:0")["narrow_packs"]
    for case in NARROW_CASES if mesh[2] == 1 else [case for case in NARROW_CASES if case != "half"]:
        assert found[f"{case}/loss"].item() == pytest.approx(loss, rel=0.05, abs=0.02), case
        for name, grad in expected.items():
            mine, wanted = found[f"{case}/{name}"].flatten(), grad.flatten()
            assert torch.nn.functional.cosine_similarity(mine, wanted, dim=0) > 0.99, (case, name)
            assert (mine - wanted).norm() / wanted.norm() < 0.1, (case, name)


@pytest.mark.parametrize("count", [2, 4])
def test_generators_over_nccl_sample_token_for_token_what_one_rank_samples(count: int, tmp_path: Path) -> None:
    """With all-reduces inside CUDA graphs, and pages so few that sequences are paused."""
    save_model(lively_model(shape=FOUR_KV_HEADS), tmp_path / "model")
    run_ranks("helpers.tensor_rank", count, str(tmp_path), device="cuda:0")
    check_same_tokens(tmp_path, count, GPU, atol=1e-4)


def test_weights_over_nccl_whoever_dies_when() -> None:
    """The tests of the process group, in a fresh interpreter: CUDA cannot be used in a fork of a process that has used it."""
    file = Path(__file__).parents[1] / "dist/test_transfer_group.py"
    environment = {**os.environ, "LLAMARL_TEST_DEVICE": "cuda:0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=300", str(file)]
    found = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=590)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]


def test_a_snapshot_over_nccl_is_gone_on_from_by_other_meshes(tmp_path: Path) -> None:
    layouts = [(1, 2, 2), (1, 4, 1), (1, 1, 1), (2, 2, 1), (1, 1, 1, 2), (1, 2, 1), (1, 1, 2)]
    found = chain(layouts, tmp_path, device="cuda:0")
    assert_goes_on(found, tmp_path, GPU)


def test_replicas_over_nccl_that_drift_apart_are_noticed(tmp_path: Path) -> None:
    save_model(lively_model(), tmp_path / "model")
    run_ranks("helpers.trainer_rank", 4, "2x2", "apart", str(tmp_path), device="cuda:0")
    assert_noticed(load_file(tmp_path / "apart"))


def test_a_job_whose_ranks_share_packs_over_nccl(tmp_path: Path) -> None:
    settings = ["trainer.context=2", "trainer.tensor=1", "trainer.share_prompts=auto", "algo.loss=gspo"]
    gaps = run(tmp_path / "run", *EXACT, *settings, "algo.reference_kl=0.1", "reference.place=trainer")
    assert len(gaps) >= 3 and max(gaps) < 1e-4, gaps


def test_a_job_with_replicas_over_nccl(tmp_path: Path) -> None:
    gaps = run(tmp_path / "run", *EXACT, "trainer.replicate=2", "trainer.tensor=1")
    assert len(gaps) >= 3 and max(gaps) < 1e-4, gaps


def run(folder: Path, *settings: str) -> list[float]:
    """The gaps between generator and trainer that probes found."""
    assert Job(load_config(None, [*SMALL, *settings])).run(folder).outcome == "finished"
    assert audit(read_ledger(folder / "ledger")).clean
    return logprob_gaps(folder)


@pytest.mark.parametrize("transport", ["cuda", "memfd"])
def test_weights_of_a_sharded_trainer_reach_a_sharded_generator(transport: str, tmp_path: Path) -> None:
    gaps = run(tmp_path / "run", *EXACT, f"weights.transport={transport}", "algo.reference_kl=0.1", "reference.data=2")
    assert len(gaps) >= 3 and max(gaps) < 1e-4, gaps


def test_fp8_on_the_wire_from_a_sharded_trainer_to_two_replicas(tmp_path: Path) -> None:
    gaps = run(tmp_path / "run", "generator.quantize=fp8", "generator.replicas=2")
    assert len(gaps) >= 3 and max(gaps) < 0.2, gaps


def test_a_rank_that_skips_an_all_reduce_is_ended_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SKIPPED_ONCE, str(tmp_path / "skipped"))
    settings = load_config(None, [*SMALL, "engine.silence_s=10"])
    summary = Job(settings, builders={"generator": skipping_generator}).run(tmp_path / "run")
    assert (summary.outcome, summary.restarts) == ("finished", 1)
    events = map(json.loads, read_events(event_file(tmp_path / "run", 0)))
    assert [event["reason"] for event in events if event["event"] == "Died"] == ["silent for 10 s with work to do"]


def test_a_wrong_slice_of_the_weights_shows_in_the_probes(tmp_path: Path) -> None:
    job = Job(load_config(None, [*SMALL, *EXACT]), builders={"generator": generator_with_a_wrong_slice})
    job.run(tmp_path / "run")
    assert max(logprob_gaps(tmp_path / "run")) > 0.01


def test_ranks_that_may_not_share_a_gpu_are_refused_with_the_way_out() -> None:
    many = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=rf"trainer\.data: {many} \* 1 ranks .*engine\.share_gpus=true"):
        Job(load_config(None, [f"trainer.data={many}"]))
