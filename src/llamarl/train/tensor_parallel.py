"""Tensor parallelism of the trainer: which module is cut how, and adapters of modules that are cut."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from llamarl.families.family import COLUMNS, ROWS, ParameterSpec
from llamarl.families.parameters import family_of, layer_parameters
from llamarl.model.experts import ExpertMLP
from llamarl.model.lora import WithAdapter, low_rank
from llamarl.model.spread import local_part
from llamarl.model.transformer import AllHeadsNorm, Transformer
from llamarl.train.mesh import TrainerMesh
from llamarl.train.shards import shard_of


def split_over_ranks(model: Transformer, mesh: TrainerMesh) -> None:
    """Makes DTensors of what the table of parameters cuts, and of inputs and outputs what its cuts ask for. A tied head must
    be tied again."""
    family, spec = family_of(model.shape), model.shape
    attention = PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    mlp = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    for number, block in enumerate(model.model.layers):
        inputs = {"self_attn": attention} if spec.has_experts(number) else {"self_attn": attention, "mlp": mlp}
        parallelize_module(block, mesh.tensor_mesh, {**inputs, **_styles(layer_parameters(spec, number), mesh)})
    parallelize_module(model, mesh.tensor_mesh, _styles([*family.before(spec), *family.after(spec)], mesh))


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


class SharedAdapter(WithAdapter):
    """Adapters of a layer that tensor ranks share. Their product is split, or part of the same sum, as the layer's own is."""

    def delta(self, x: Tensor) -> Tensor:
        weight, input_ = cast(DTensor, self.weight), cast(DTensor, x)
        out: Placement
        if weight.placements[0] == Shard(COLUMNS):
            x_local, out = input_.to_local(), Partial()
        else:
            x_local, out = input_.to_local(grad_placements=[Partial()]), Shard(x.dim() - 1)
        a, b = (local_part(one.weight).to(self.adapters.dtype).to(x.dtype) for one in (self.lora_A, self.lora_B))
        product = low_rank(x_local, a, b, self.adapters.lora.scale)
        return DTensor.from_local(product, weight.device_mesh, [out], run_check=False)


def spread_adapter(adapter: nn.Parameter, spec: ParameterSpec, mesh: TrainerMesh) -> nn.Parameter:
    """The adapter, cut as the table says; one that is whole stays a plain tensor."""
    inner = Replicate() if spec.split is None else Shard(spec.split)
    if mesh.expert > 1 and spec.by_expert:
        return nn.Parameter(distribute_tensor(adapter.detach(), mesh.expert_mesh, [Shard(0), inner]))
    return (
        adapter if spec.split is None else nn.Parameter(distribute_tensor(adapter.detach(), mesh.tensor_mesh, [inner]))
    )
