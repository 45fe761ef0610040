"""Adapters in the trainer: frozen layers with trainable fp32 matrices beside them, sharded as the table of adapters says.

With tensor parallelism, an adapter that is split is a DTensor, and one that is whole is a plain tensor, as norms are. A rank
applies a whole adapter to its own part of the states, so gradients of whole adapters are summed over the tensor ranks, once
per update (`parallel.complete_gradients`). Adapters of experts lie on the ranks that hold the experts.
"""

from __future__ import annotations

import hashlib
from math import sqrt
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from llamarl.config.lora import LoraConfig
from llamarl.families.adapters import LORA_A, adapter_parameters
from llamarl.families.family import COLUMNS, ParameterSpec
from llamarl.layout.boxes import relative, whole
from llamarl.model.adapter_folder import check_same, open_adapter
from llamarl.model.experts import local_part
from llamarl.model.lora import WithAdapter, add_adapters, low_rank
from llamarl.model.transformer import Transformer
from llamarl.train.mesh import TrainerMesh
from llamarl.train.narrow_base import adapters_see_rounded
from llamarl.train.shards import trained_shards


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


def add_trained_adapters(model: Transformer, lora: LoraConfig, mesh: TrainerMesh) -> None:
    """Freezes the model and adds adapters, uninitialized. Tensor parallelism must be applied already, FSDP not yet."""
    device = model.model.norm.weight.device

    def make(spec: ParameterSpec) -> nn.Parameter:
        memory = torch.empty(spec.shape, dtype=torch.float32, device=device)
        inner = Replicate() if spec.split is None else Shard(spec.split)
        if mesh.expert > 1 and spec.by_expert:
            return nn.Parameter(distribute_tensor(memory, mesh.expert_mesh, [Shard(0), inner]))
        split = mesh.tensor > 1 and spec.split is not None
        return nn.Parameter(distribute_tensor(memory, mesh.tensor_mesh, [inner]) if split else memory)

    add_adapters(model, lora, make, SharedAdapter if mesh.tensor > 1 else WithAdapter)
    adapters_see_rounded(model)


@torch.no_grad()
def start_adapters(model: Transformer, lora: LoraConfig, seed: int) -> None:
    """Fills the adapters of version 0: A with random numbers that depend on the seed alone, B with zeros, so that version
    0 is the base exactly."""
    specs = adapter_parameters(model.shape, lora)
    for name, shard in trained_shards(model).items():
        if name.endswith(f"{LORA_A}.weight"):
            size = specs[name].shape
            shard.tensor.copy_(_random(name, size, seed)[relative(shard.box, whole(size))])
        else:
            shard.tensor.zero_()


def load_adapters(model: Transformer, lora: LoraConfig, folder: Path) -> None:
    """Reads this rank's shards of the adapters from a folder. InputError if they have other settings."""
    found = open_adapter(folder, model.shape)
    check_same(lora, found)
    shards = {name: one for name, one in trained_shards(model).items() if one.tensor.numel()}
    found.fill({name: one.tensor for name, one in shards.items()}, lambda spec: shards[spec.name].box)


def _random(name: str, size: tuple[int, ...], seed: int) -> Tensor:
    """Uniform in +-1/sqrt(inputs), as PEFT begins."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return (torch.rand(size, generator=generator) * 2 - 1) / sqrt(size[-1])
