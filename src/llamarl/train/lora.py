"""Adapters in the trainer: frozen layers with trainable fp32 matrices beside them, sharded as the table of adapters says.

With tensor parallelism, an adapter that is split is a DTensor, and one that is whole is a plain tensor, as norms are. A rank
applies a whole adapter to its own part of the states, so gradients of whole adapters are summed over the tensor ranks, once
per update (`parallel.complete_gradients`). Adapters of experts lie on the ranks that hold the experts.
"""

from __future__ import annotations

import hashlib
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from llamarl.config.lora import LoraConfig
from llamarl.families.adapters import LORA_A, adapter_parameters
from llamarl.families.family import ParameterSpec
from llamarl.layout.boxes import relative, whole
from llamarl.model.adapter_folder import check_same, open_adapter
from llamarl.model.lora import add_adapters
from llamarl.model.transformer import Transformer
from llamarl.train.mesh import TrainerMesh
from llamarl.train.narrow_base import adapters_see_rounded
from llamarl.train.shards import trained_shards


def add_trained_adapters(model: Transformer, lora: LoraConfig, mesh: TrainerMesh) -> None:
    """Freezes the model and adds adapters, uninitialized. Tensor parallelism must be applied already, FSDP not yet."""
    device = model.model.norm.weight.device

    def make(spec: ParameterSpec) -> nn.Parameter:
        return nn.Parameter(torch.empty(spec.shape, dtype=torch.float32, device=device))

    if mesh.tensor > 1:
        from llamarl.train.tensor_parallel import SharedAdapter, spread_adapter

        add_adapters(model, lora, lambda spec: spread_adapter(make(spec), spec, mesh), SharedAdapter)
    else:
        add_adapters(model, lora, make)
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
