"""Sharding of the trainer's model over ranks, by torch's FSDP."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llamarl.model.transformer import Transformer
from llamarl.train.mesh import TrainerMesh


def shard_over_ranks(model: Transformer, mesh: TrainerMesh, compute_dtype: torch.dtype) -> None:
    """Master weights and reductions stay fp32; passes see `compute_dtype`. Gradients are summed, not averaged, since the
    loss is divided by the tokens of the whole update."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    modules = [*model.model.layers, model]
    for module in modules:
        fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=policy)
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
