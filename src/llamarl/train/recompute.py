"""Computes activations again in the backward pass, instead of keeping them: those of MLPs, or of whole blocks.

Tensor ranks all have the same stream of states between blocks. So where whole blocks are computed again, each rank keeps its
part of a block's input only, and gathers the rest from the others when it is needed: the same numbers, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llamarl.model.transformer import Transformer
from llamarl.train.mesh import TrainerMesh


def recompute_inside(model: Transformer, what: str) -> None:
    """Recomputes MLPs ("selective"), which have most of the activations and are cheap to compute again, or whole blocks."""
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # warns of `_keeping_nothing`
    for block in model.model.layers:
        module: Any = block.mlp if what == "selective" else block
        module.forward = MethodType(_forward_again, module)


def _forward_again(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    # torch 2.11 would compile it to keep the results of autograd functions, if it was not told to keep nothing.
    told: dict[str, Any] = {"context_fn": _keeping_nothing} if torch.compiler.is_compiling() else {}
    out: Tensor = checkpoint(type(module).forward, module, *args, use_reentrant=False, **told, **kwargs)
    return out


def _keeping_nothing() -> Any:
    return create_selective_checkpoint_contexts(_never)  # type: ignore[no-untyped-call]


def _never(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def recompute_from_parts(model: Transformer, mesh: TrainerMesh) -> None:
    """Recomputes whole blocks from inputs that are spread over the tensor ranks. For blocks that are compiled already."""
    block: Any
    for block in model.model.layers:
        block.forward = partial(_forward_from_part, block.forward, mesh)


def _forward_from_part(forward: Callable[..., Tensor], mesh: TrainerMesh, x_RTC: Tensor, *args: Any) -> Tensor:
    shape = x_RTC.shape

    def keep(saved: Tensor) -> tuple[Tensor, bool]:
        spread = saved.shape == shape and saved.numel() % mesh.tensor == 0
        return (saved.flatten().chunk(mesh.tensor)[mesh.tensor_rank].clone(), True) if spread else (saved, False)

    def find(kept: tuple[Tensor, bool]) -> Tensor:
        saved, spread = kept
        return _gather(saved, mesh).view(shape) if spread else saved

    with saved_tensors_hooks(keep, find):  # applies to the block's inputs: what is inside is not saved
        out: Tensor = checkpoint(forward, x_RTC, *args, use_reentrant=False, preserve_rng_state=False)
    return out


def _gather(part: Tensor, mesh: TrainerMesh) -> Tensor:
    whole = torch.empty(mesh.tensor, *part.shape, dtype=part.dtype, device=part.device)
    dist.all_gather(list(whole.unbind()), part, group=mesh.tensor_group)
    return whole
