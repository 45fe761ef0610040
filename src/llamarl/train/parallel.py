"""Parallelism, applied to the model from outside, in this order: tensor parallel, adapters, recompute, compile, FSDP.

No module is wrapped, so parameters keep their Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.families.adapters import trained_parameters
from llamarl.families.family import ROWS, ParameterSpec
from llamarl.families.parameters import family_of, layer_parameters
from llamarl.model.experts import ExpertMLP
from llamarl.model.ops import Rope
from llamarl.model.transformer import AllHeadsNorm, Transformer
from llamarl.train.compiler import compiled_when_called
from llamarl.train.lora import add_trained_adapters
from llamarl.train.mesh import TrainerMesh
from llamarl.train.offload import offload_activations
from llamarl.train.recompute import recompute_from_parts, recompute_inside
from llamarl.train.shards import shard_of

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
        _tensor_parallel(model, mesh)
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
        _fsdp(model, mesh, compute_dtype)


def _tensor_parallel(model: Transformer, mesh: TrainerMesh) -> None:
    family, spec = family_of(model.shape), model.shape
    attention = PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    mlp = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    for number, block in enumerate(model.model.layers):
        inputs = {"self_attn": attention} if spec.has_experts(number) else {"self_attn": attention, "mlp": mlp}
        parallelize_module(block, mesh.tensor_mesh, {**inputs, **_styles(layer_parameters(spec, number), mesh)})
    parallelize_module(model, mesh.tensor_mesh, _styles([*family.before(spec), *family.after(spec)], mesh))
    tie_head(model)


def _styles(parameters: Iterable[ParameterSpec], mesh: TrainerMesh) -> dict[str, ParallelStyle]:
    """Maps each module that tensor parallelism cuts to torch's style for it. Torch means the transposed weights of layers:
    its columns are our rows. An embedding is not transposed."""
    found: dict[str, ParallelStyle] = {}
    for parameter in parameters:
        if parameter.kind == "embedding":
            found[parameter.module] = RowwiseParallel(input_layouts=Replicate())
        elif parameter.kind == "wide_norm":
            found[parameter.module] = SplitNorm()
        elif parameter.is_expert:
            found["mlp"] = SplitExperts(mesh.expert_mesh)
        elif parameter.split is not None:
            found[parameter.module] = ColwiseParallel() if parameter.split == ROWS else RowwiseParallel()
    return found


class SplitNorm(ParallelStyle):
    """Splits a norm that spans all heads: each rank has the weights of its heads, and the squares are summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AllHeadsNorm)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))
        module.sum_over_ranks = partial(_sum_over, device_mesh)
        return module


class SplitExperts(ParallelStyle):
    """Splits the inner units of each expert, or first the experts: every rank computes its part of the result, and the router
    whole."""

    def __init__(self, expert_mesh: DeviceMesh | None) -> None:
        self._expert_mesh = expert_mesh

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ExpertMLP)
        experts = module.experts
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            by_expert = self._expert_mesh is not None
            held = distribute_tensor(whole, self._expert_mesh or device_mesh, [Shard(0)] * by_expert + [Shard(2)])
            setattr(experts, name, nn.Parameter(held))
        experts.first = shard_of(experts.gate_up_proj).box[0][0]
        module.enter, module.leave = partial(_shared_input, device_mesh), partial(_whole_output, device_mesh)
        return module


def _shared_input(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The input of what each rank computes a part of: its gradient is the sum over the ranks."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _whole_output(mesh: DeviceMesh, part: Tensor) -> Tensor:
    """The sum of the ranks' parts of a result."""
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).full_tensor()


def _sum_over(mesh: DeviceMesh, squares: Tensor) -> Tensor:
    """The sum over the ranks, each of which applies it to heads of its own: their gradients are summed as well."""
    parts = DTensor.from_local(squares, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


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


def _fsdp(model: Transformer, mesh: TrainerMesh, compute_dtype: torch.dtype) -> None:
    """Master weights and reductions stay fp32; passes see `compute_dtype`. Gradients are summed, not averaged, since the
    loss is divided by the tokens of the whole update."""
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    modules = [*model.model.layers, model]
    for module in modules:
        fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=policy)
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def sum_over_replicas(model: Transformer, mesh: TrainerMesh, now: bool) -> None:
    """Whether the next backward pass sums gradients over the replicas too. Until then, each replica adds up its own."""
    if mesh.replicate > 1:
        cast(FSDPModule, model).set_requires_all_reduce(now)


def counts_here(parameter: Tensor, mesh: TrainerMesh) -> bool:
    """Whether this is the first tensor rank that holds its shard: where it counts in sums over all ranks."""
    if mesh.tensor_rank == 0:
        return True
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, parameter.placements, strict=True))
    if placements.get("inner", placements.get("tensor", Replicate())) != Replicate():
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
