"""Several NCCL ranks on one GPU compute what one rank computes, and their weights reach generators of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.models import lively_model
from helpers.ranks import run_ranks
from helpers.trainer_rank import DOCUMENTS, make_learner, train, whole_masters
from helpers.training import assert_same_gradients, make_test_documents, naive_gradients
from safetensors.torch import load_file

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError
from llamarl.model.checkpoint import save_model
from llamarl.train.mesh import LONE_RANK

GPU = torch.device("cuda", 0)
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


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_a_trainer_over_nccl_computes_what_one_rank_computes(data: int, tensor: int, tmp_path: Path) -> None:
    save_model(lively_model(), tmp_path / "model")
    run_ranks("helpers.trainer_rank", data * tensor, str(data), "gradients,updates", str(tmp_path), device="cuda:0")
    loss, expected = naive_gradients(lively_model(), make_test_documents(DOCUMENTS))
    found = load_file(tmp_path / "gradients")
    for case in ("one", "several", "full"):
        gradients = {
            name.removeprefix(f"{case}/"): value for name, value in found.items() if name.startswith(f"{case}/")
        }
        assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-4)
        assert_same_gradients(gradients, expected)
    updates = load_file(tmp_path / "updates")
    assert updates["same"].item() == 1, "a snapshot is gone on from bit for bit"
    learner = make_learner(tmp_path / "model", LONE_RANK, device=GPU)
    train(learner)
    differs = [(updates[name] - master.cpu()).abs().flatten() > 1e-4 for name, master in whole_masters(learner).items()]
    assert torch.cat(differs).float().mean() < 2e-3


def run(folder: Path, *settings: str) -> list[float]:
    """The gaps between generator and trainer that probes found."""
    assert Job(load_config(None, [*SMALL, *settings])).run(folder).outcome == "finished"
    assert audit(read_ledger(folder / "ledger")).clean
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["logprob_gap"] for row in rows if "logprob_gap" in row]


@pytest.mark.parametrize("transport", ["cuda", "memfd"])
def test_weights_of_a_sharded_trainer_reach_a_sharded_generator(transport: str, tmp_path: Path) -> None:
    gaps = run(tmp_path / "run", *EXACT, f"weights.transport={transport}", "algo.reference_kl=0.1", "reference.data=2")
    assert len(gaps) >= 3 and max(gaps) < 1e-4, gaps


def test_fp8_on_the_wire_from_a_sharded_trainer_to_two_replicas(tmp_path: Path) -> None:
    gaps = run(tmp_path / "run", "generator.quantize=fp8", "generator.replicas=2")
    assert len(gaps) >= 3 and max(gaps) < 0.2, gaps


def test_ranks_that_may_not_share_a_gpu_are_refused_with_the_way_out() -> None:
    many = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=rf"trainer\.data: {many} \* 1 ranks .*engine\.share_gpus=true"):
        Job(load_config(None, [f"trainer.data={many}"]))
