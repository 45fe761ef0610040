"""Whether products are right on a part of a GPU's multiprocessors, to which NVIDIA's MPS can keep a process.

cuBLAS of CUDA 13.0 computes some of them wrong there, and says nothing. On an H200, 80 and 98 of its 132 multiprocessors gave
results of which up to half was wrong, and 66 gave right ones (docs/engines.md). So whoever computes on a part tries the
products of its model first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from llamarl.config import Config
from llamarl.families.parameters import parameter_shapes
from llamarl.model.hf_config import read_shape
from llamarl.model_spec import ModelSpec
from llamarl.weights.cuda_driver import mps_enabled

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_TOKENS = (8192, 5000)
_ROWS, _COLUMNS = 256, 512  # of each result, by chance: few tiles of 128 rows are missed
_ERROR = 0.02  # bf16 rounds to 0.004


def wrong_products(config: Config) -> str:
    """In an executor's process, once CUDA runs: what is wrong with computing there; empty: nothing, or all
    multiprocessors may be used."""
    if not os.environ.get(SHARE) or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    device = torch.device("cuda", torch.cuda.current_device())
    if not mps_enabled(device.index):
        return ""
    found = first_wrong(matrices_of(read_shape(config.model_folder)), device)
    torch.cuda.empty_cache()
    if not found:
        return ""
    number = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        f"engine.mps_trainer_share: a product of {found} is wrong on {number} multiprocessors of this GPU ({SHARE}="
        f"{os.environ[SHARE]}), by a fault of CUDA; choose another share, or 1 for all of them"
    )


def matrices_of(spec: ModelSpec) -> list[tuple[int, ...]]:
    """Sizes of a model's matrices, outputs by inputs, each once."""
    return sorted({shape for shape in parameter_shapes(spec).values() if len(shape) == 2})


def first_wrong(matrices: Iterable[tuple[int, ...]], device: torch.device) -> str:
    """The sizes of the first product that is wrong: of states, their gradients and those of the weights; empty: none is."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)

    for outputs, inputs in matrices:
        weight = normal(outputs, inputs)
        for tokens in _TOKENS:
            states, grads = normal(tokens, inputs), normal(tokens, outputs)
            for left, right in ((states, weight.t()), (grads, weight), (grads.t(), states)):
                if not _is_right(left, right, generator):
                    return f"{left.shape[0]} x {left.shape[1]} by {right.shape[0]} x {right.shape[1]} numbers"
    return ""


def _is_right(left: Tensor, right: Tensor, generator: torch.Generator) -> bool:
    """Some numbers of the product, against the same ones computed on the host."""
    rows, columns = (
        torch.randint(size, (count,), generator=generator, device=left.device)
        for size, count in ((left.shape[0], _ROWS), (right.shape[1], _COLUMNS))
    )
    found = (left @ right)[rows][:, columns].float().cpu()
    expected = left[rows].float().cpu() @ right[:, columns].float().cpu()
    return torch.isclose(found, expected, rtol=_ERROR, atol=_ERROR * left.shape[1] ** 0.5).all().item() is True
