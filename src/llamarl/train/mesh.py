"""The trainer's ranks as a mesh: `data` ranks share an update's documents, `context` ranks share the tokens of each pack, and
both shard the weights; `tensor` ranks share every product, and `replicate` copies of such a mesh share documents too. Experts
lie whole on `expert` parts of the tensor ranks.

A single rank is a mesh too: its collectives are no-ops, so that callers need not ask how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class TrainerMesh:
    data: int = 1
    tensor: int = 1
    rank: int = 0
    devices: DeviceMesh | None = None
    replicate: int = 1
    batch: DeviceMesh | None = None  # all ranks that share an update's tokens
    context: int = 1
    context_mesh: DeviceMesh | None = None  # the ranks that share this rank's packs
    expert: int = 1
    flat_tensor: DeviceMesh | None = None  # the tensor ranks in one dimension, where `devices` has two for experts

    @property
    def size(self) -> int:
        return self.token_ranks * self.tensor

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP shards the weights over: `data` and `context` ranks alike."""
        return self.data * self.context

    @property
    def token_ranks(self) -> int:
        """Number of ranks that share an update's tokens."""
        return self.replicate * self.shards

    @property
    def batch_ranks(self) -> int:
        """Number of parts that an update's documents are dealt into."""
        return self.replicate * self.data

    @property
    def batch_rank(self) -> int:
        """Number of this rank's part of an update's documents."""
        return self.rank // (self.context * self.tensor)

    @property
    def replica(self) -> int:
        """Number of the copy of the sharded model that this rank belongs to."""
        return self.rank // (self.shards * self.tensor)

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def context_rank(self) -> int:
        return self.rank // self.tensor % self.context

    @property
    def context_group(self) -> dist.ProcessGroup:
        assert self.context_mesh is not None
        return self.context_mesh.get_group()

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh of FSDP: `shards`, or (`replicate`, `shards`), which makes it HSDP."""
        assert self.devices is not None
        return self.devices["replicate", "shards"] if self.replicate > 1 else self.devices["shards"]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        assert self.devices is not None
        return self.flat_tensor or self.devices["tensor"]

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The tensor ranks as two dimensions: parts that hold different experts, and ranks that share the inner units of
        each. None: all of them share every expert."""
        assert self.devices is not None
        return self.devices["expert", "inner"] if self.expert > 1 else None

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        return self.tensor_mesh.get_group() if self.tensor > 1 else None

    @property
    def inner_group(self) -> dist.ProcessGroup | None:
        """The tensor ranks with the same experts, which share the inner units of each."""
        assert self.devices is not None
        return self.devices["inner"].get_group() if self.expert > 1 else self.tensor_group

    @property
    def _batch_group(self) -> dist.ProcessGroup:
        assert self.batch is not None
        return self.batch.get_group()

    def sum_over_batch(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that share an update's tokens."""
        if self.token_ranks > 1:
            dist.all_reduce(tensor, group=self._batch_group)
        return tensor

    def max_over_batch(self, tensor: Tensor) -> Tensor:
        """Maximum over the ranks that share an update's tokens."""
        if self.token_ranks > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._batch_group)
        return tensor

    def sum_over_context(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that share this rank's packs."""
        if self.context > 1:
            dist.all_reduce(tensor, group=self.context_group)
        return tensor

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of the first replica. All replicas get the same bits, so that they cannot drift apart."""
        if self.replica:
            tensor.zero_()
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def take_from_first_replica(self, tensor: Tensor) -> None:
        """Replaces the numbers by those of the same shard in the first replica."""
        if self.replicate > 1:
            dist.broadcast(tensor, group=self.replicate_group, group_src=0)

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shards."""
        assert self.devices is not None
        return self.devices["replicate"].get_group()


LONE_RANK = TrainerMesh()


def make_mesh(
    data: int, tensor: int, rank: int, device: torch.device, replicate: int = 1, context: int = 1, expert: int = 1
) -> TrainerMesh:
    """The mesh of this rank. Neighboring ranks share products: they talk most, so they should be closest. Then come those
    that share packs. Replicas talk once per update, so they may be farthest."""
    if replicate * data * context * tensor == 1:
        return LONE_RANK
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise torch takes the GPU with this rank's number, as does FSDP then
    sizes = {"replicate": replicate, "shards": data * context, "tensor": tensor}
    if replicate == 1:
        del sizes["replicate"]
    if expert > 1:
        del sizes["tensor"]
        sizes |= {"expert": expert, "inner": tensor // expert}
    devices = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    flat_tensor = devices["expert", "inner"]._flatten("tensor") if expert > 1 else None
    batch = devices["shards"] if replicate == 1 else devices["replicate", "shards"]._flatten("batch")
    packs = None
    if context > 1:
        counts = (replicate * data, context, tensor)
        packs = init_device_mesh(device.type, counts, mesh_dim_names=("packs", "context", "tensor"))["context"]
    return TrainerMesh(data, tensor, rank, devices, replicate, batch, context, packs, expert, flat_tensor)
