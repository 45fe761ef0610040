"""One rank of a trainer, as `helpers.ranks.run_ranks` starts it.

Ranks rendezvous through a file in a folder and communicate over loopback. Rank 0 writes its results there as safetensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.experts import with_routes
from helpers.layouts import part
from helpers.lora import LORA
from helpers.ranks import DEVICE, join_in, leave_group
from helpers.training import make_test_documents
from helpers.trees import flash_on_cpu, make_branching_documents
from llamarl.algo.batch import VALUE, Document
from llamarl.algo.gae import RETURNS, VALUES
from llamarl.algo.losses import LOSSES, REFERENCE_LOGPROBS, aipo_loss, gspo_loss
from llamarl.algo.streams import StreamWeights
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.errors import JobFailed
from llamarl.model.experts import ExpertMLP
from llamarl.model.training_state import CRITIC, MANIFEST, OF_CRITIC, POLICY, SnapshotManifest
from llamarl.train import compiler
from llamarl.train.exchange import Exchange
from llamarl.train.learner import Learner
from llamarl.train.mesh import TrainerMesh, make_mesh
from llamarl.train.policy import ComputeSettings, Policy, load_policy, load_value_policy
from llamarl.train.restore import load_masters, restore
from llamarl.train.shards import owned_shards, trained_shards
from llamarl.train.state import TrainingState, critic_state, gather
from llamarl.train.token_column import TokenColumn

DOCUMENTS = 13
UPDATES = 3


def make_learner(
    folder: Path,
    mesh: TrainerMesh,
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
    **how: object,
) -> Learner:
    computing = ComputeSettings(device, dtype, mesh, **how)  # type: ignore[arg-type]
    adapter = folder.parent / "adapter" if computing.lora else None
    policy = load_policy(folder, computing, adapter=adapter)
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


def save_snapshot(learner: Learner, carry_from: Path, snapshot: Path) -> dict[str, str]:
    """Writes a snapshot of all ranks, with its manifest; returns its files."""
    mesh = learner.policy.computing.mesh
    state = TrainingState(learner.policy.model, learner.optimizer, carry_from, mesh)
    state.take()
    files, problem = Exchange(mesh).merge(state.write(snapshot), "")
    assert not problem
    if mesh.rank == 0:
        manifest = SnapshotManifest(learner.optimizer.num_steps, files)
        (snapshot / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return files


def load_adapted_snapshot(snapshot: Path, model: Path, mesh: TrainerMesh) -> Learner:
    """Goes on with adapters: the base comes from the model folder, all else from the snapshot."""
    computing = ComputeSettings(DEVICE, torch.float32, mesh, lora=LORA)
    policy = load_policy(model, computing, adapter=snapshot / POLICY)
    settings = TrainerConfig(lr=1e-2, warmup_updates=0, max_grad_norm=0.5)
    learner = Learner(policy, aipo_loss, settings=settings, algo=AlgoConfig(), updates=10)
    restore(policy.model, learner.optimizer, snapshot)
    return learner


def load_snapshot(snapshot: Path, mesh: TrainerMesh, dtype: torch.dtype = torch.float32) -> Learner:
    learner = make_learner(snapshot / POLICY, mesh, dtype)
    restore(learner.policy.model, learner.optimizer, snapshot)
    return learner


def whole_state(learner: Learner) -> dict[str, Tensor]:
    """Masters and moments, gathered from all ranks."""
    parameters = dict(learner.policy.model.named_parameters())
    moments = {
        name: gather(tensor, parameters[name.partition("/")[0]]).cpu().clone()
        for name, tensor in learner.optimizer.state_tensors().items()
    }
    return {**moments, **{name: master.cpu() for name, master in whole_masters(learner).items()}}


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


def routed(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients and log-probs of a model with experts, where documents say which ones computed them."""
    documents = [with_routes(document, seed) for seed, document in enumerate(make_test_documents(DOCUMENTS))]
    learner = make_learner(folder / "model", mesh, replay_routes=True)
    seen = learner.accumulate(documents)
    return {**whole_gradients(learner), "loss": torch.tensor([seen.loss()])}


def off_by_one(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients where the last rank takes its experts for those whose numbers are one higher."""
    learner = make_learner(folder / "model", mesh)
    for block in learner.policy.model.model.layers:
        if isinstance(block.mlp, ExpertMLP) and mesh.rank == mesh.size - 1:
            block.mlp.experts.first += 1
    learner.accumulate(make_test_documents(DOCUMENTS))
    return whole_gradients(learner)


def trees(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients, metrics and kept log-probs where documents share what they begin with, and how many tokens they share."""
    documents, found = make_branching_documents(), dict[str, Tensor]()
    cases: dict[str, dict[str, object]] = {"one": {}, "several": {"tokens_per_pack": 40}, "full": {"recompute": "full"}}
    for case, how in cases.items():
        learner = make_learner(folder / "model", mesh, torch.float32, DEVICE, share_prompts="on", **how)
        seen = learner.accumulate(documents)
        found |= {f"{case}/{name}": grad for name, grad in whole_gradients(learner).items()}
        found[f"{case}/loss"] = torch.tensor([seen.loss()])
        tokens = sum(len(document.tokens) for document in documents)
        found[f"{case}/shared_tokens"] = torch.tensor([tokens - seen.totals(documents, 4.0).work.tokens])
    column = TokenColumn(documents, learner.policy)
    for pack in learner.policy.packs(documents):
        logprobs_N = learner.policy.logprobs(pack)
        if pack.counts:
            column.fill(pack.places, logprobs_N)
    found["logprobs"] = torch.cat([torch.frombuffer(bytearray(one), dtype=torch.float32) for one in column.complete()])
    return found | {f"metric/{name}": torch.tensor([value]) for name, value in seen.metrics(documents, 4.0).items()}


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
    files = save_snapshot(first, folder / "model", folder / "snapshot")
    second = load_snapshot(folder / "snapshot", mesh)
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


def adapters(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients of adapters, in one pass, in several and with recompute; adapters after some updates, straight and from a
    snapshot; log-probs with and without them; and the number of trained and frozen elements that this rank holds."""
    documents, found = make_test_documents(DOCUMENTS), dict[str, Tensor]()
    cases: dict[str, dict[str, object]] = {
        "one": {},
        "several": {"tokens_per_pack": 24},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
    }
    for case, how in cases.items():
        learner = make_learner(folder / "model", mesh, torch.float32, DEVICE, lora=LORA, **how)
        seen = learner.accumulate(documents)
        found |= {f"{case}/{name}": grad for name, grad in whole_gradients(learner).items()}
        found[f"{case}/loss"] = torch.tensor([seen.loss()])
    policy = learner.policy
    assert policy.model.adapters is not None
    found["hash"] = torch.tensor(list(learner.adapter_hash(()).begin().text().encode()))
    found["with"] = probe_logprobs(policy, documents)
    with policy.model.adapters.off():
        found["without"] = probe_logprobs(policy, documents)
    straight = make_learner(folder / "model", mesh, lora=LORA)
    found["grad_norm"] = torch.tensor([train(straight)["grad_norm"]])
    first = make_learner(folder / "model", mesh, lora=LORA)
    train(first, last=1)
    save_snapshot(first, folder / "model", folder / "adapted")
    second = load_adapted_snapshot(folder / "adapted", folder / "model", mesh)
    train(second, first=1)
    resumed, masters = whole_masters(second), whole_masters(straight)
    same = all(torch.equal(resumed[name], master) for name, master in masters.items())
    found |= {f"made/{name}": master for name, master in masters.items()}
    trained, held = trained_shards(straight.policy.model), owned_shards(straight.policy.model)
    counts = [sum(one.tensor.numel() for one in shards.values()) for shards in (trained, held)]
    return {**found, "same": torch.tensor([int(same)]), "held": torch.tensor(counts)}


def narrow_adapters(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """The types in which bf16 passes hold base and adapters, and gradients of the latter."""
    learner = make_learner(folder / "model", mesh, torch.bfloat16, lora=LORA)
    learner.accumulate(make_test_documents(DOCUMENTS))
    adapters = trained_shards(learner.policy.model)
    for name, shard in owned_shards(learner.policy.model).items():
        assert shard.tensor.dtype == (torch.float32 if name in adapters else torch.bfloat16), name
    return whole_gradients(learner)


def one_more_adapted(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """As `one_more`, with adapters."""
    made = max([int(path.name) for path in folder.iterdir() if path.name.isdigit()], default=0)
    if made:
        learner = load_adapted_snapshot(folder / str(made), folder / "model", mesh)
    else:
        learner = make_learner(folder / "model", mesh, lora=LORA)
    found = {f"read/{name}": tensor for name, tensor in whole_state(learner).items()}
    metrics = train(learner, first=made, last=made + 1)
    save_snapshot(learner, folder / "model", folder / str(made + 1))
    found |= {f"written/{name}": tensor for name, tensor in whole_state(learner).items()}
    return found | {name: torch.tensor([metrics[name]]) for name in ("loss", "grad_norm")}


def narrow(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Masters after some updates with bf16 passes."""
    learner = make_learner(folder / "model", mesh, torch.bfloat16)
    train(learner)
    return whole_masters(learner)


def apart(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients where replicas never sum theirs, and whether a snapshot notices the drift that follows, and one wrong bit."""
    sound = make_learner(folder / "model", mesh)
    train(sound, last=1)
    state = TrainingState(sound.policy.model, sound.optimizer, folder / "model", mesh)
    state.take()
    if mesh.replica == 1 and mesh.rank == mesh.size - 1:
        sound.optimizer.slots[3].state["exp_avg"].view(torch.int32)[0] += 1
    one_bit = drifts(
        state,
        f"in 1 of {3 * len(sound.optimizer.slots)} tensors, the first of them {sound.optimizer.slots[3].name}/exp_avg;",
    )
    with patch.object(TrainerMesh, "fsdp_mesh", property(lambda self: self.devices["shards"])):
        learner = make_learner(folder / "model", mesh)
    learner.accumulate(make_test_documents(DOCUMENTS))
    found = whole_gradients(learner)
    learner.step(0, 0.0)
    drift = drifts(TrainingState(learner.policy.model, learner.optimizer, folder / "model", mesh), "different numbers")
    return {**found, "drift": torch.tensor([int(drift)]), "one_bit": torch.tensor([int(one_bit)])}


def drifts(state: TrainingState, message: str) -> bool:
    try:
        state.take()
    except JobFailed as error:
        return message in str(error)
    return False


def one_more(mesh: TrainerMesh, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Goes on from the newest of the snapshots `1`, `2` and so on in the folder, or from the model: the state that it reads,
    one update, and the next snapshot with the state that it holds."""
    made = max([int(path.name) for path in folder.iterdir() if path.name.isdigit()], default=0)
    learner = load_snapshot(folder / str(made), mesh, dtype) if made else make_learner(folder / "model", mesh, dtype)
    found = {f"read/{name}": tensor for name, tensor in whole_state(learner).items()}
    metrics = train(learner, first=made, last=made + 1)
    save_snapshot(learner, folder / "model", folder / str(made + 1))
    found |= {f"written/{name}": tensor for name, tensor in whole_state(learner).items()}
    return found | {name: torch.tensor([metrics[name]]) for name in ("loss", "grad_norm")}


def shared_packs(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients, where ranks share packs: of plain documents and of trees, for every loss, with every kind of recompute, with
    FlashAttention's way, compiled; metrics, and log-probs of a probe."""
    documents, found = make_branching_documents(), dict[str, Tensor]()

    def add(
        case: str, loss: str = "aipo", count: int = len(documents), dtype: torch.dtype = torch.float32, **how: object
    ) -> Learner:
        computing = ComputeSettings(DEVICE, dtype, mesh, **how)  # type: ignore[arg-type]
        algo = AlgoConfig(loss=loss, gspo_low=0.5, gspo_high=0.5, entropy=0.1, reference_kl=0.2)
        policy = load_policy(folder / "model", computing)
        learner = Learner(policy, LOSSES[loss], settings=TrainerConfig(), algo=algo, updates=10)
        seen = learner.accumulate(documents[:count])
        found.update({f"{case}/{name}": grad for name, grad in whole_gradients(learner).items()})
        found[f"{case}/loss"] = torch.tensor([seen.loss()])
        metrics = seen.metrics(documents[:count], 4.0)
        found.update({f"{case}/metric/{name}": torch.tensor([value]) for name, value in metrics.items()})
        found[f"{case}/work"] = torch.tensor(seen.totals(documents[:count], 4.0).work)
        return learner

    for loss in LOSSES:
        add(loss, loss)
    add("gspo trees", "gspo", share_prompts="on")
    add("trees", share_prompts="on", tokens_per_pack=50)
    add("full", recompute="full", tokens_per_pack=30)
    add("selective", recompute="selective")
    learner = add("lonely", count=1)
    with flash_on_cpu(), patch.object(ComputeSettings, "long_rows", property(lambda _: True)):
        add("flash", dtype=torch.float64)  # fp32 would mean fp16 products
        add("flash trees", dtype=torch.float64, share_prompts="on", recompute="full")
    compiler.compile_backend = lambda: "aot_eager"  # type: ignore[attr-defined]
    add("compiled", compiled=True, recompute="full", tokens_per_pack=60)
    return found | {"logprobs": probe_logprobs(learner.policy, documents)}


NARROW_CASES: dict[str, dict[str, object]] = {
    "documents": {},
    "trees": {"share_prompts": "on"},
    "several": {"tokens_per_pack": 300, "share_prompts": "on"},
    "compiled": {"compiled": True, "recompute": "selective"},
    "compiled trees": {"compiled": True, "recompute": "full", "share_prompts": "on"},
    "offload": {"compiled": True, "recompute": "offload"},
    "half": {"share_prompts": "on"},
}


def narrow_packs(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients on a GPU, where attention is FlashAttention's."""
    documents, found = make_branching_documents(8, 6, longest=40), dict[str, Tensor]()
    for case, how in NARROW_CASES.items():
        dtype = torch.float16 if case == "half" else torch.bfloat16
        if case == "half" and mesh.tensor > 1:
            continue
        policy = load_policy(folder / "model", ComputeSettings(DEVICE, dtype, mesh, **how))  # type: ignore[arg-type]
        learner = Learner(policy, aipo_loss, settings=TrainerConfig(), algo=AlgoConfig(), updates=10)
        seen = learner.accumulate(documents)
        found |= {f"{case}/{name}": grad for name, grad in whole_gradients(learner).items()}
        found[f"{case}/loss"] = torch.tensor([seen.loss()])
    return found


def probe_logprobs(policy: Policy, documents: list[Document]) -> Tensor:
    """Log-probs of documents that every rank computes, or every group of ranks that share packs."""
    column = TokenColumn(documents, policy)
    for pack in policy.packs(documents, same_everywhere=True):
        logprobs_N = policy.logprobs(pack)
        if pack.counts:
            column.fill(pack.places, logprobs_N)
    values = column.complete(same_everywhere=True)
    return torch.cat([torch.frombuffer(bytearray(one), dtype=torch.float32) for one in values])


def compiled(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients of compiled blocks, over passes of several lengths. Their kernels are torch's own, which saves a minute."""
    found = dict[str, Tensor]()
    compiler.compile_backend = lambda: "aot_eager"  # type: ignore[attr-defined]
    for recompute in ("none", "full"):
        learner = make_learner(folder / "model", mesh, recompute=recompute, compiled=True, tokens_per_pack=48)
        learner.accumulate(make_test_documents(DOCUMENTS))
        found |= {f"{recompute}/{name}": grad for name, grad in whole_gradients(learner).items()}
    return found


def value_documents(seed: int = 0) -> list[Document]:
    """Documents that a critic learns from."""
    rng, found = np.random.default_rng(seed), []
    for one in make_test_documents(DOCUMENTS, seed=seed):
        values, returns = (rng.normal(0, 2, one.num_answer_tokens).astype(np.float32) for _ in range(2))
        found.append(replace(one, streams=VALUE, columns={VALUES: values, RETURNS: returns}))
    return found


def make_value_learner(folder: Path, mesh: TrainerMesh) -> Learner:
    policy = load_value_policy(folder, ComputeSettings(DEVICE, torch.float32, mesh, tokens_per_pack=60))
    settings = TrainerConfig(lr=1e-2, warmup_updates=0, max_grad_norm=0.5)
    weights = StreamWeights(value_clip=0.2)
    return Learner(policy, aipo_loss, settings=settings, algo=AlgoConfig(), updates=10, weights=weights)


def critic(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients of a critic's loss, its weights after two updates, and the same after a snapshot was read again."""
    learner = make_value_learner(folder / "value", mesh)
    seen = learner.accumulate(value_documents())
    found = {f"gradient/{name}": one for name, one in whole_gradients(learner).items()}
    found["loss"] = torch.tensor(seen.loss())
    for update in range(2):
        learner.learn(update, value_documents(update))
    state = critic_state(learner.policy, learner.optimizer, folder / "value")
    state.take()
    Exchange(mesh).merge(state.write(folder / "snapshot"), "")
    again = make_value_learner(folder / "snapshot" / CRITIC, mesh)
    restore(again.policy.model, again.optimizer, folder / "snapshot", OF_CRITIC)
    for one, prefix in ((learner, "straight"), (again, "resumed")):
        one.learn(2, value_documents(2))
        found |= {f"{prefix}/{name}": master for name, master in whole_masters(one).items()}
    return found


def balanced(mesh: TrainerMesh, folder: Path) -> dict[str, Tensor]:
    """Gradients with a balancing loss and without, in one pass and recomputed, and the loss itself."""
    documents, found = make_test_documents(DOCUMENTS), dict[str, Tensor]()
    for recompute in ("none", "full"):
        for weight in (0.0, 0.3):
            learner = make_learner(folder / "model", mesh, balance_loss=weight, recompute=recompute)
            seen = learner.accumulate(documents)
            found |= {f"{recompute}/{weight}/{name}": one for name, one in whole_gradients(learner).items()}
        assert seen.routing is not None
        metrics = seen.routing.totals(mesh).metrics()
        found[f"{recompute}/balance_loss"] = torch.tensor([metrics["balance_loss"]])
    return found


TASKS: dict[str, Callable[[TrainerMesh, Path], dict[str, Tensor]]] = {
    "gradients": gradients,
    "trees": trees,
    "sequence_loss": sequence_loss,
    "updates": updates,
    "narrow": narrow,
    "apart": apart,
    "adapters": adapters,
    "narrow_adapters": narrow_adapters,
    "one_more_adapted": one_more_adapted,
    "one_more": one_more,
    "one_more_narrow": partial(one_more, dtype=torch.bfloat16),
    "compiled": compiled,
    "critic": critic,
    "shared_packs": shared_packs,
    "narrow_packs": narrow_packs,
    "balanced": balanced,
    "routed": routed,
    "off_by_one": off_by_one,
}


def mesh_of(text: str) -> tuple[int, int, int, int]:
    """replicate, data, context, expert of DATA, REPLICATExDATA, REPLICATExDATAxCONTEXT or REPLICATExDATAxCONTEXTxEXPERT;
    other ranks are tensor parallel."""
    sizes = [int(size) for size in text.split("x")]
    replicate, data, context, expert = {1: [1, *sizes, 1, 1], 2: [*sizes, 1, 1], 3: [*sizes, 1], 4: sizes}[len(sizes)]
    return replicate, data, context, expert


def main(rank: int, count: int, ranks: str, tasks: str, into: str) -> None:
    replicate, data, context, expert = mesh_of(ranks)
    folder = Path(into)
    join_in(folder, rank, count)
    mesh = make_mesh(data, count // (replicate * data * context), rank, DEVICE, replicate, context, expert)
    for task in tasks.split(","):
        found = TASKS[task](mesh, folder)
        if rank == 0:
            save_file({name: tensor.detach().float().contiguous() for name, tensor in found.items()}, folder / task)
    leave_group()
