"""Replicas of the trainer must hold the same numbers. They get the same gradients, so a difference is a fault."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.errors import JobFailed
from llamarl.train.mesh import TrainerMesh
from llamarl.train.optimizer import AdamW


@torch.no_grad()
def refuse_drift(optimizer: AdamW, mesh: TrainerMesh) -> None:
    """JobFailed, on every rank, unless all replicas hold the same weights and moments bit for bit (a collective)."""
    if mesh.replicate == 1:
        return
    held = {slot.name: slot.local for slot in optimizer.slots} | optimizer.state_tensors()
    device = optimizer.slots[0].local.device
    sums = torch.stack([_sum_of_bits(tensor).to(device) for tensor in held.values()])
    least, most = sums.clone(), sums
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=mesh.replicate_group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.replicate_group)
    differs = (least != most).int()
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if drifted := [name for name, one in zip(held, differs.tolist(), strict=True) if one]:
        raise JobFailed(
            f"trainer.replicate: the {mesh.replicate} replicas hold different numbers in {len(drifted)} of {len(held)} "
            f"tensors, the first of them {drifted[0]}; a rank has missed a sum of gradients, or its memory is faulty"
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum of the fp32 numbers' bit patterns: one read, and any single change shows."""
    return tensor.view(torch.int32).sum(dtype=torch.int64)
