"""The trainer's ranks as a mesh: `data` ranks share an update's tokens, `tensor` ranks share every product.

A single rank is a mesh too: its collectives are no-ops, so that callers need not ask how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llamarl.errors import ConfigError
from llamarl.model_spec import ModelSpec


@dataclass(frozen=True)
class TrainerMesh:
    data: int = 1
    tensor: int = 1
    rank: int = 0
    devices: DeviceMesh | None = None

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def data_mesh(self) -> DeviceMesh:
        assert self.devices is not None
        return self.devices["data"]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        assert self.devices is not None
        return self.devices["tensor"]

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        return self.tensor_mesh.get_group() if self.tensor > 1 else None

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        if self.data > 1:
            dist.all_reduce(tensor, group=self.data_mesh.get_group())
        return tensor

    def max_over_data(self, tensor: Tensor) -> Tensor:
        if self.data > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.data_mesh.get_group())
        return tensor

    def sum_over_all(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


LONE_RANK = TrainerMesh()


def make_mesh(data: int, tensor: int, rank: int, device: torch.device) -> TrainerMesh:
    """The mesh of this rank. Neighboring ranks share products: they talk most, so they should be closest."""
    if data * tensor == 1:
        return LONE_RANK
    devices = init_device_mesh(device.type, (data, tensor), mesh_dim_names=("data", "tensor"))
    return TrainerMesh(data, tensor, rank, devices)


def check_tensor_parallel(shape: ModelSpec, tensor: int, key: str) -> None:
    """ConfigError unless heads and the MLP's width divide evenly."""
    for name in ("num_kv_heads", "num_heads", "intermediate_size"):
        if (size := getattr(shape, name)) % tensor:
            raise ConfigError(f"{key}: {tensor} ranks cannot share the model's {name}={size} evenly")
