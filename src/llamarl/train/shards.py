"""The shards of a model that this rank of the trainer owns."""

from __future__ import annotations

from torch import Tensor

from llamarl.layout.boxes import whole
from llamarl.model.shards import Shard
from llamarl.model.spread import is_spread
from llamarl.model.transformer import Transformer


def owned_shards(model: Transformer) -> dict[str, Shard]:
    """Maps each parameter name to this rank's shard, which may be empty. The shards of all ranks cover every parameter. Ranks
    with the same shard (tensor ranks, of a parameter that tensor parallelism leaves whole) hold the same numbers."""
    return {name: shard_of(parameter) for name, parameter in model.named_parameters()}


def trained_shards(model: Transformer) -> dict[str, Shard]:
    """As `owned_shards`, of the parameters that are trained: those that are published and saved."""
    return {name: shard_of(parameter) for name, parameter in trained(model).items()}


def trained(model: Transformer) -> dict[str, Tensor]:
    """The parameters that are trained: all, or the adapters."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def shard_of(tensor: Tensor) -> Shard:
    """Writing into the shard's tensor writes the parameter."""
    if not is_spread(tensor):
        return Shard(tensor.detach(), whole(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(tuple(tensor.shape), tensor.device_mesh, tensor.placements)
    box = tuple((first, first + size) for first, size in zip(offset, local, strict=True))
    return Shard(tensor.to_local().detach(), box)
