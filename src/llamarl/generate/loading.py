"""Loads the weights of one rank of a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llamarl.families.parameters import parameters
from llamarl.generate.limits import Precision
from llamarl.generate.parallel import TensorRank, split_block, split_over_ranks
from llamarl.model.checkpoint import give_memory, meta_model
from llamarl.model.quantize import quantize_block
from llamarl.model.transformer import Transformer, fuse
from llamarl.model_spec import ModelSpec

Fill = Callable[[Mapping[str, Tensor]], None]  # reads this rank's shards of the named parameters into this memory


def load_rank(
    shape: ModelSpec, part: TensorRank, precision: Precision, *, dtype: torch.dtype, device: torch.device, fill: Fill
) -> Transformer:
    """One rank of the model. Where wide weights need not stay, each block is narrowed as soon as it is read: then the narrow
    model must fit into memory, and only one wide block."""
    model, names = meta_model(shape), list(parameters(shape))
    if precision.weights != "none" and not precision.keep_wide:
        block: Any
        for number, block in enumerate(model.model.layers):
            of_block = [f"model.layers.{number}.{name}" for name, _ in block.named_parameters()]
            fill(give_memory(model, of_block, dtype=dtype, device=device, box_of=part.box))
            split_block(block, part)
            fuse(block)
            quantize_block(block, precision.weights, keep_wide=False)
        names = [name for name in names if model.get_parameter(name).is_meta]
    fill(give_memory(model, names, dtype=dtype, device=device, box_of=part.box))
    split_over_ranks(model, part)
    return model
