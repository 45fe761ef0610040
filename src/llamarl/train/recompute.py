"""Computes activations again in the backward pass, instead of keeping them: those of MLPs, or of whole blocks.

Tensor ranks all have the same stream of states between blocks. So where whole blocks are computed again, each rank keeps its
part of a block's input only, and gathers the rest from the others when it is needed: the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llamarl.model.transformer import Transformer
from llamarl.train.mesh import TrainerMesh

_HOW = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a block is random


def recompute_inside(model: Transformer, what: str) -> None:
    """Recomputes MLPs ("selective"), which have most of the activations and are cheap to compute again, or whole blocks."""
    for block in model.model.layers:
        module: Any = block.mlp if what == "selective" else block
        module.forward = MethodType(_forward_again, module)


def _forward_again(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = checkpoint(type(module).forward, module, *args, use_reentrant=False, **kwargs)
    return out


def recompute_from_parts(model: Transformer, mesh: TrainerMesh) -> None:
    """Recomputes whole blocks from inputs that are spread over the tensor ranks. For blocks that are compiled already."""
    block: Any
    for block in model.model.layers:
        block.forward = partial(_forward_from_part, block.forward, mesh)


def _forward_from_part(forward: Callable[..., Tensor], mesh: TrainerMesh, x: Tensor, *args: Any) -> Tensor:
    if x.numel() % mesh.tensor:
        whole: Tensor = checkpoint(forward, x, *args, **_HOW)
        return whole
    shape = x.shape

    def run(part: Tensor) -> Tensor:
        return forward(_Gather.apply(part, mesh).view(shape), *args)  # type: ignore[no-untyped-call]

    out: Tensor = checkpoint(run, _Take.apply(x, mesh), **_HOW)  # type: ignore[no-untyped-call]
    return out


class _Take(torch.autograd.Function):
    """This rank's part of a tensor that all tensor ranks have; its gradient is one that all have too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: TrainerMesh) -> Tensor:
        ctx.mesh, ctx.shape = mesh, x.shape
        return _take(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.mesh).view(ctx.shape), None


class _Gather(torch.autograd.Function):
    """The whole tensor from the parts of all tensor ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: TrainerMesh) -> Tensor:
        ctx.mesh = mesh
        return _gather(part, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _take(grads[0], ctx.mesh), None


def _take(x: Tensor, mesh: TrainerMesh) -> Tensor:
    return x.flatten().chunk(mesh.tensor)[mesh.tensor_rank].clone()


def _gather(part: Tensor, mesh: TrainerMesh) -> Tensor:
    whole = part.new_empty(mesh.tensor * part.numel())
    dist.all_gather_into_tensor(whole, part, group=mesh.tensor_group)
    return whole
