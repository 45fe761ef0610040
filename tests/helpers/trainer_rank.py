"""One rank of a trainer, as a program: `python -m helpers.trainer_rank RANK COUNT DATA TASKS FOLDER`.

Ranks rendezvous through a file in FOLDER and communicate over loopback. Rank 0 writes its results to FOLDER as safetensors.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from helpers.layouts import part
from helpers.ranks import DEVICE, join_in, leave_group
from helpers.training import make_test_documents
from llamarl.algo.losses import REFERENCE_LOGPROBS, aipo_loss, gspo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.model.training_state import POLICY
from llamarl.train import parallel
from llamarl.train.exchange import Exchange
from llamarl.train.learner import Learner
from llamarl.train.mesh import TrainerMesh, make_mesh
from llamarl.train.policy import ComputeSettings, load_policy
from llamarl.train.shards import owned_shards
from llamarl.train.state import TrainingState, gather, load_masters, restore

DOCUMENTS = 13
UPDATES = 3


def make_learner(
    folder: Path,
    mesh: TrainerMesh,
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
    **how: object,
) -> Learner:
    policy = load_policy(folder, ComputeSettings(device, dtype, mesh, **how))  # type: ignore[arg-type]
    settings = TrainerConfig(lr=1e-2, warmup_updates=0, max_grad_norm=0.5)
    learner = Learner(policy, aipo_loss, settings=settings, algo=AlgoConfig(), updates=10)
    load_masters(policy.model, learner.optimizer, folder)
    return learner


def whole_gradients(learner: Learner) -> dict[str, Tensor]:
    parameters = dict(learner.policy.model.named_parameters())
    return {name: gather(grad, parameters[name]).clone() for name, grad in learner.optimizer.gradients().items()}


def whole_masters(learner: Learner) -> dict[str, Tensor]:
    parameters = dict(learner.policy.model.named_parameters())
    return {name: gather(master, parameters[name]).clone() for name, master in learner.optimizer.masters()}


def train(learner: Learner, first: int = 0, last: int = UPDATES) -> dict[str, float]:
    for update in range(first, last):
        seen = learner.accumulate(make_test_documents(DOCUMENTS, seed=update))
        metrics = {
            **seen.metrics(make_test_documents(DOCUMENTS, seed=update), 4.0),
            **learner.step(update, seen.loss()),
        }
    return metrics


def gradients(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients and metrics of one update: in one pass, in several, with recompute, and with few documents."""
    documents, found = make_test_documents(DOCUMENTS), dict[str, Tensor]()
    cases: dict[str, dict[str, object]] = {"one": {}, "several": {"tokens_per_pack": 24}, "full": {"recompute": "full"}}
    for case, how in cases.items():
        learner = make_learner(folder / "model", mesh, torch.float32, DEVICE, **how)
        seen = learner.accumulate(documents)
        found |= {f"{case}/{name}": grad for name, grad in whole_gradients(learner).items()}
        found[f"{case}/loss"] = torch.tensor([seen.loss()])
    found |= {f"metric/{name}": torch.tensor([value]) for name, value in seen.metrics(documents, 4.0).items()}
    learner = make_learner(folder / "model", mesh)
    learner.accumulate(documents[:1])
    found |= {f"lonely/{name}": grad for name, grad in whole_gradients(learner).items()}
    return found


def sequence_loss(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """A loss over whole sequences, with all optional terms."""
    policy = load_policy(folder / "model", ComputeSettings(DEVICE, torch.float32, mesh, temperature=0.7))
    algo = AlgoConfig(loss="gspo", gspo_low=0.5, gspo_high=0.5, entropy=0.1, reference_kl=0.2)
    learner = Learner(policy, gspo_loss, settings=TrainerConfig(), algo=algo, updates=10)
    documents = [
        replace(document, columns={REFERENCE_LOGPROBS: document.behavior_logprobs})
        for document in make_test_documents(DOCUMENTS)
    ]
    seen = learner.accumulate(documents)
    return {**whole_gradients(learner), "loss": torch.tensor([seen.loss()])}


def updates(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Masters after some updates; and again, when another learner continues from a snapshot in between."""
    straight = make_learner(folder / "model", mesh)
    metrics = train(straight)
    first = make_learner(folder / "model", mesh)
    train(first, last=1)
    state = TrainingState(first.policy.model, first.optimizer, folder / "model", mesh)
    state.take()
    dist.barrier()
    files, problem = Exchange(mesh).merge(state.write(folder / "snapshot"), "")
    assert not problem
    second = make_learner(folder / "snapshot" / POLICY, mesh)
    restore(second.optimizer, folder / "snapshot", mesh)
    train(second, first=1)
    resumed = whole_masters(second)
    found = whole_masters(straight)
    same = all(torch.equal(resumed[name], master) for name, master in found.items())
    shards = owned_shards(straight.policy.model)
    for name, shard in shards.items():  # what this rank says it holds is what the whole has there
        assert torch.equal(shard.tensor, part(found[name], shard.box)), name
    held = sum(shard.tensor.numel() for shard in shards.values())
    return {
        **found,
        "same": torch.tensor([int(same)]),
        "held": torch.tensor([held]),
        "files": torch.tensor([len(files)]),
        "grad_norm": torch.tensor([metrics["grad_norm"]]),
    }


def narrow(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Masters after some updates with bf16 passes."""
    learner = make_learner(folder / "model", mesh, torch.bfloat16)
    train(learner)
    return whole_masters(learner)


def compiled(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients of compiled blocks, over passes of several lengths. Their kernels are torch's own, which saves a minute."""
    found = dict[str, Tensor]()
    parallel.compile_backend = lambda: "aot_eager"  # type: ignore[attr-defined]
    for recompute in ("none", "full"):
        learner = make_learner(folder / "model", mesh, recompute=recompute, compiled=True, tokens_per_pack=48)
        learner.accumulate(make_test_documents(DOCUMENTS))
        found |= {f"{recompute}/{name}": grad for name, grad in whole_gradients(learner).items()}
    return found


TASKS = {
    "gradients": gradients,
    "sequence_loss": sequence_loss,
    "updates": updates,
    "narrow": narrow,
    "compiled": compiled,
}


def main() -> None:
    rank, count, data = map(int, sys.argv[1:4])
    tasks, folder = sys.argv[4], Path(sys.argv[5])
    join_in(folder, rank, count)
    mesh = make_mesh(data, count // data, rank, DEVICE)
    for task in tasks.split(","):
        found = TASKS[task](mesh, folder)
        if rank == 0:
            save_file({name: tensor.detach().float().contiguous() for name, tensor in found.items()}, folder / task)
    leave_group()


if __name__ == "__main__":
    main()
