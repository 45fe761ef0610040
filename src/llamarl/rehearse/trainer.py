"""One rank of a planned trainer: built, and taken through an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llamarl.algo.batch import Document
from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.layout.model import check_shared
from llamarl.model.base import Base, BaseLayout
from llamarl.model.quantize import fp8_product, quantize_rows
from llamarl.model.transformer import Transformer
from llamarl.plan.trainer import TrainerRanks
from llamarl.rehearse.experts import EXPERT_OPERATIONS, EXPERT_TWINS
from llamarl.rehearse.memory import RankMemory
from llamarl.rehearse.tracking import MemoryTracker
from llamarl.rehearse.world import DEVICE, fake_memory, fake_ranks
from llamarl.train.learner import Learner
from llamarl.train.mesh import make_mesh
from llamarl.train.narrow_base import take_narrow_base
from llamarl.train.optimizer import AdamW
from llamarl.train.parallel import tie_head
from llamarl.train.pinned import HostArena
from llamarl.train.policy import ComputeSettings, Policy, meta_shards, parallelize_for

_HOST = "host memory"


def rehearse_trainer(ranks: TrainerRanks, rank: int, *, prompt: int, answer: int) -> RankMemory:
    """Memory of one rank over an update of two full passes, with documents of these lengths. The first pass makes the sums of
    gradients; like all later passes, the second one runs beside them."""
    check_shared(ranks.shape, ranks.tp, ranks.expert, "trainer")
    narrow = bool(ranks.lora) and ranks.base == "fp8"
    twins = *EXPERT_TWINS, *((fp8_product, quantize_rows) if narrow else ())
    owners: dict[Callable[..., Any], str] = {AdamW._collect: "gradients", HostArena._make: _HOST}
    tracker = MemoryTracker("activations", twins=twins, owners=owners, opened=EXPERT_OPERATIONS)
    with fake_ranks(rank, ranks.ranks):
        mesh = make_mesh(ranks.data, ranks.tp, rank, DEVICE, ranks.replicate, ranks.context, ranks.expert)
        computing = ComputeSettings(
            DEVICE,
            torch.bfloat16,
            mesh,
            recompute=ranks.recompute,
            compiled=True,
            tokens_per_pack=ranks.tokens_per_pack,
            lora=ranks.lora,
        )
        sharded = None if narrow else meta_shards(ranks.shape, computing)
        with fake_memory(tracker):
            with tracker.kind("weights"):
                model = _narrow_base(ranks, computing) if sharded is None else _give_memory(sharded)
                _pad_shards(model, tracker)
            with tracker.kind(_HOST if ranks.offload else "optimizer state"):
                learner = Learner(
                    Policy(model, computing), aipo_loss, settings=TrainerConfig(), algo=AlgoConfig(), updates=1
                )
            _label_gradients(learner, tracker)
            _update(learner, _documents(ranks, prompt, answer))
    return RankMemory(rank, {kind: size for kind, size in tracker.at_peak.items() if kind != _HOST})


def _narrow_base(ranks: TrainerRanks, computing: ComputeSettings) -> Transformer:
    """A model on a frozen base in fp8, which is whole on the one rank, as in a job."""
    layout = BaseLayout(ranks.shape, torch.bfloat16, "fp8")
    model = Base(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, device=DEVICE)).model()
    take_narrow_base(model)
    parallelize_for(model, computing)
    return model


def _label_gradients(learner: Learner, tracker: MemoryTracker) -> None:
    """Tells the tracker which memory that FSDP makes is a sum of gradients."""

    def made(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype == torch.float32:
            tracker.relabel(parameter.grad, "gradients")

    for slot in learner.optimizer.slots:
        slot.parameter.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]


def _update(learner: Learner, documents: list[Document]) -> None:
    seen = learner.accumulate(documents)
    totals = seen.totals(documents, rho=4.0)
    learner.step(0, seen.total_loss())
    totals.metrics()


def _documents(ranks: TrainerRanks, prompt: int, answer: int) -> list[Document]:
    """As many documents as fill two passes of all ranks, of about these lengths."""
    each = max(1, ranks.tokens_per_pack // (prompt + answer))
    answer = ranks.tokens_per_pack // each - prompt
    one = Document(
        tokens=np.zeros(prompt + answer, dtype=np.int32),
        num_prompt_tokens=prompt,
        behavior_logprobs=np.zeros(answer, dtype=np.float32),
        staleness=np.zeros(answer, dtype=np.int64),
        advantages=np.ones(answer, dtype=np.float32),
    )
    return [one] * (2 * each * ranks.batch_ranks)


def _give_memory(model: Transformer) -> Transformer:
    """Replaces every shard on the meta device by one with memory."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_with_memory(parameter), requires_grad=parameter.requires_grad))
    tie_head(model)
    return model


def _pad_shards(model: Transformer, tracker: MemoryTracker) -> None:
    """Has FSDP pad uneven shards now, as it does in a job when weights get memory, and not in the first pass: then the
    optimizer would hold what they were padded from as well."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()
        for parameter in model.parameters():
            tracker.relabel(parameter, "weights")


def _with_memory(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
    local = torch.empty(parameter.to_local().shape, dtype=parameter.dtype, device=DEVICE)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
