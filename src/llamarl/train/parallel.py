"""Parallelism, applied to the model from outside, in this order: tensor parallel, adapters, recompute, compile, FSDP.

No module is wrapped, so parameters keep their Hugging Face names. What only several ranks need is imported where they are:
torch's part of it takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.families.adapters import trained_parameters
from llamarl.model.ops import Rope
from llamarl.model.spread import is_spread
from llamarl.model.transformer import Transformer
from llamarl.train.compiler import compiled_when_called
from llamarl.train.lora import add_trained_adapters
from llamarl.train.mesh import TrainerMesh
from llamarl.train.offload import offload_activations
from llamarl.train.recompute import recompute_from_parts, recompute_inside

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_MAX_GRAPHS = 64


def parallelize(
    model: Transformer,
    mesh: TrainerMesh,
    *,
    recompute: str = "none",
    compiled: bool = False,
    compute_dtype: torch.dtype,
    lora: LoraConfig = NO_LORA,
) -> None:
    """Shards `model` over the mesh. Its parameters may still be on the meta device."""
    if mesh.tensor > 1:
        from llamarl.train.tensor_parallel import split_over_ranks

        split_over_ranks(model, mesh)
        tie_head(model)
    if lora:
        add_trained_adapters(model, lora, mesh)
    from_parts = recompute == "full" and mesh.tensor > 1
    if recompute != "none" and not from_parts:
        recompute_inside(model, "full" if recompute == "full" else "selective")
    # torch 2.13 compiles no blocks of DTensors whose sizes are unknown, and none that are computed again inside the graph.
    if compiled:
        _compile(model, any_length=mesh.tensor == 1)
    if from_parts:
        recompute_from_parts(model, mesh)
    if recompute == "offload":
        offload_activations(model)
    if mesh.token_ranks > 1:
        from llamarl.train.fsdp import shard_over_ranks

        shard_over_ranks(model, mesh, compute_dtype)


def tie_head(model: Transformer) -> None:
    """Ties the head again, after parameters were replaced one by one."""
    if model.shape.tied_head:
        model.lm_head.weight = model.model.embed_tokens.weight


def _compile(model: Transformer, *, any_length: bool) -> None:
    """Compiles block by block, so that all blocks share one graph and FSDP's hooks stay outside of it: one graph for rows of
    any length, or one for each length. Packs have a few dozen shapes at most; beyond its limit torch would silently stop
    compiling."""
    torch._dynamo.config.recompile_limit = max(_MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    # Graphs with autograd functions of our own are kept between starts too, which torch does only if asked.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    block: Any
    for block in model.model.layers:
        block.self_attn.layer = (
            0  # the trainer's attention ignores the layer; different numbers would make different graphs
        )
        forward = compiled_when_called(block.forward, dynamic=None if any_length else False)
        block.forward = _for_any_length(forward) if any_length else _awaited(forward)


def _for_any_length(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks the length of rows as dynamic, so that torch makes one graph for all lengths from the start."""

    def call(x_RTC: Tensor, rope: Rope, *args: Any, **kwargs: Any) -> Tensor:
        routes = [one for one in args if isinstance(one, Tensor)]
        for tensor in (x_RTC, *rope, *routes):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return forward(x_RTC, rope, *args, **kwargs)

    return call


def _awaited(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Awaits an input whose collective is still under way: its type would make another graph, without gradients."""

    def call(x_RTC: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(x_RTC.clone() if isinstance(x_RTC, AsyncCollectiveTensor) else x_RTC, *args, **kwargs)

    return call


def sum_over_replicas(model: Transformer, mesh: TrainerMesh, now: bool) -> None:
    """Whether the next backward pass sums gradients over the replicas too. Until then, each replica adds up its own."""
    if mesh.replicate > 1:
        cast("FSDPModule", model).set_requires_all_reduce(now)


def counts_here(parameter: Tensor, mesh: TrainerMesh) -> bool:
    """Whether this is the first tensor rank that holds its shard: where it counts in sums over all ranks."""
    if mesh.tensor_rank == 0:
        return True
    if not is_spread(parameter):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, parameter.placements, strict=True))
    across = placements.get("inner", placements.get("tensor"))
    if across is not None and not across.is_replicate():
        return True
    return "expert" in placements and mesh.tensor_rank % (mesh.tensor // mesh.expert) == 0


def complete_gradients(grads: Mapping[str, Tensor], model: Transformer, mesh: TrainerMesh) -> None:
    """Sums gradients over the tensor ranks of parameters that each rank holds whole and applies to its own part of the
    states: norms of heads, and whole adapters. Other whole parameters are applied to whole states. Ranks with other experts
    have other adapters of theirs."""
    if mesh.tensor == 1:
        return
    table = trained_parameters(model.shape, model.adapters.lora if model.adapters else NO_LORA)
    found = {name: grad for name, grad in grads.items() if table[name].has_partial_gradient}
    for by_expert, group in ((False, mesh.tensor_group), (True, mesh.inner_group)):
        _sum_gradients([one for name, one in found.items() if table[name].by_expert == by_expert], mesh, group)


def _sum_gradients(partial: Sequence[Tensor], mesh: TrainerMesh, group: dist.ProcessGroup | None) -> None:
    if not partial:
        return
    flat = torch.cat([grad.flatten() for grad in partial])
    dist.all_reduce(flat, group=group)
    mesh.take_from_first_replica(flat)
    for grad, total in zip(partial, torch.split(flat, [grad.numel() for grad in partial]), strict=True):
        grad.copy_(total.view_as(grad))
