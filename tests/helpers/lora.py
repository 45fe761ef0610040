"""A small model with adapters that change what it says, and what training them must come to: the merged model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from helpers.layouts import part
from helpers.models import SHAPE, lively_model
from helpers.training import CPU, naive_gradients
from llamarl.algo.batch import Document
from llamarl.config import LoraConfig
from llamarl.families.adapters import adapted_layers, adapter_names, adapter_parameters
from llamarl.families.family import ParameterSpec
from llamarl.layout.boxes import Box
from llamarl.model.adapter_folder import load_merged, save_adapter
from llamarl.model.base import Base, BaseLayout, BasePrecision, read_base
from llamarl.model.checkpoint import open_checkpoint, save_model
from llamarl.model.lora import matrices
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec
from llamarl.weights.shared_memory import private_memory

LORA = LoraConfig(rank=3, alpha=6.0)  # a rank that data-parallel ranks cannot share evenly


def random_adapters(lora: LoraConfig = LORA, shape: ModelSpec = SHAPE, seed: int = 0) -> dict[str, Tensor]:
    """Adapters of which both A and B are far from zero."""
    generator = torch.Generator().manual_seed(seed)
    specs = adapter_parameters(shape, lora)
    return {name: torch.randn(one.shape, generator=generator) * 0.2 for name, one in specs.items()}


def save_both(folder: Path, lora: LoraConfig = LORA, shape: ModelSpec = SHAPE, seed: int = 0) -> Path:
    """Writes `model` and `adapter` into the folder; returns the adapter's."""
    save_model(lively_model(shape=shape), folder / "model")
    save_adapter(random_adapters(lora, shape, seed), lora, shape, folder / "adapter", folder / "model")
    return folder / "adapter"


def base_of(folder: Path, precision: BasePrecision = "wide", dtype: torch.dtype = torch.float32) -> Base:
    """The frozen base of a folder, in memory of this process."""
    checkpoint = open_checkpoint(folder)
    layout = BaseLayout(checkpoint.shape, dtype, precision)
    return Base(layout, private_memory(CPU, layout.num_bytes, lambda memory: read_base(checkpoint, layout, memory)))


def merged_gradients(
    adapter: Path, documents: Sequence[Document], adapters: Mapping[str, Tensor], lora: LoraConfig = LORA
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the adapters, from those of the merged weights: dA = scale B' dW and dB = scale dW A'."""
    model = load_merged(adapter, dtype=torch.float32)
    loss, grads = naive_gradients(model, documents)
    found = {}
    for weight in adapted_layers(model.shape, lora):
        name_a, name_b = adapter_names(weight)
        grad, a, b = map(matrices, (grads[weight.name], adapters[name_a], adapters[name_b]))
        found[name_a] = (lora.scale * b.mT @ grad).view_as(adapters[name_a])
        found[name_b] = (lora.scale * grad @ a.mT).view_as(adapters[name_b])
    return loss, found


def put_adapters(model: Transformer, adapters: Mapping[str, Tensor], box_of: Callable[[ParameterSpec], Box]) -> None:
    """Writes a rank's shards of whole adapters into a generator's model, as a new version does."""
    assert model.adapters is not None
    specs, held = adapter_parameters(model.shape, model.adapters.lora), dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in adapters.items():
            held[name].copy_(part(whole, box_of(specs[name])))
