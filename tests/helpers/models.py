"""A small model whose predictions depend strongly on its context, so that a mistake in a cache or a mask shows."""

from __future__ import annotations

import torch

from llamarl.model.checkpoint import random_model
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec

VOCABULARY, EOS = 23, 0
SHAPE = ModelSpec(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)


def lively_model(seed: int = 0, shape: ModelSpec = SHAPE) -> Transformer:
    """A model with random weights, scaled up until attention is sharp and the next token far from uniform."""
    model = random_model(shape, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    return model


def copy_weights(source: Transformer, target: Transformer) -> None:
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
