"""Whether products are right on a part of a GPU's multiprocessors, to which NVIDIA's MPS can keep a process.

cuBLAS of CUDA 13.0 computes some of them wrong there, and says nothing (docs/one-gpu.md). So a trainer that computes on a
part first tries the products of its model, as its passes have them: of states, of their gradients, of those of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llamarl.config import Config
from llamarl.families.parameters import parameter_shapes
from llamarl.model.hf_config import read_shape
from llamarl.model_spec import ModelSpec
from llamarl.weights.cuda_driver import mps_enabled

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_TOKENS = (8192, 5000)
_MOST_NUMBERS = 1 << 28  # of a result: scores are computed for some tokens at a time
_TILE = 64  # one number of each tile of a result is held against the host's
_ERROR = 0.02  # bf16 rounds to 0.004


def wrong_products(config: Config, device: torch.device) -> str:
    """What is wrong with a trainer that computes on a part of this device; empty: nothing, or it computes without MPS, on all
    of it. A driver that cannot tell whether MPS is used is taken to use it."""
    torch.zeros(1, device=device)  # starts CUDA, as the driver's call needs it
    if mps_enabled(device.index or 0) is False:
        return ""
    spec = read_shape(config.model_folder)
    found = "experts, which cannot be tried," if spec.experts else first_wrong(spec, device)
    if not found:
        return ""
    number = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        f"engine.mps_trainer_share: products of {found} may be wrong on {number} multiprocessors of this GPU, by a fault of "
        f"CUDA; choose another share, or 1 for all of them"
    )


def first_wrong(spec: ModelSpec, device: torch.device) -> str:
    """The sizes of the first product of a dense model that is wrong; empty: none is."""
    generator = torch.Generator(device=device).manual_seed(0)
    matrices = {shape for shape in parameter_shapes(spec).values() if len(shape) == 2}
    for outputs, inputs in sorted(matrices):
        for left, right in _products(outputs, inputs, generator):
            if not _is_right(left, right, generator):
                return f"{tuple(left.shape)} by {tuple(right.shape)} numbers"
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ""


def _products(outputs: int, inputs: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)

    weight = normal(outputs, inputs)
    for tokens in _TOKENS:
        rows = min(tokens, _MOST_NUMBERS // outputs)
        states, grads = normal(rows, inputs), normal(rows, outputs)
        yield states, weight.t()
        yield grads, weight
        yield grads.t(), states


def _is_right(left: Tensor, right: Tensor, generator: torch.Generator) -> bool:
    """One number of each tile of the product, against the same ones computed on the host."""
    rows, columns = (_one_of_each_tile(size, generator) for size in (left.shape[0], right.shape[1]))
    found = (left @ right)[rows][:, columns].float().cpu()
    expected = left[rows].float().cpu() @ right[:, columns].float().cpu()
    return torch.isclose(found, expected, rtol=_ERROR, atol=_ERROR * left.shape[1] ** 0.5).all().item() is True


def _one_of_each_tile(size: int, generator: torch.Generator) -> Tensor:
    starts = torch.arange(0, size, _TILE, device=generator.device)
    within = torch.randint(_TILE, starts.shape, generator=generator, device=generator.device)
    return (starts + within).clamp_(max=size - 1)
