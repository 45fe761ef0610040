"""Speed of training against the peak of the hardware: floating-point operations, MFU."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.families.adapters import active_adapter_parameters
from llamarl.families.parameters import matrix_parameters
from llamarl.model_spec import ModelSpec
from llamarl.plan.gpus import peaks_of

_PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}


class UpdateWork(NamedTuple):
    """What passes compute, without padding: tokens, each once where documents share it, and their squared lengths, less what
    they share (`TreeBranch.squares`)."""

    tokens: float
    squares: float


def training_flops(shape: ModelSpec, lengths: Iterable[int], lora: LoraConfig = NO_LORA) -> float:
    """Floating-point operations of an update: 6 per matrix weight and token (forward 2, backward 4, or 2 for a frozen one),
    and 6 per layer, query feature and pair of tokens in causal attention (12 without the causal half). Recomputed work does
    not count."""
    sizes = list(lengths)
    return flops_of(shape, UpdateWork(sum(sizes), sum(size * size for size in sizes)), lora)


def flops_of(shape: ModelSpec, work: UpdateWork, lora: LoraConfig = NO_LORA) -> float:
    """As `training_flops`, of what was computed."""
    products = (4.0 if lora else 6.0) * matrix_parameters(shape) + 6.0 * active_adapter_parameters(shape, lora)
    seen = (
        shape.attended_share(work.squares / work.tokens) if work.tokens else 1.0
    )  # with windows, as if all were alike
    return products * work.tokens + 6.0 * shape.num_layers * shape.q_size * work.squares * seen


def datasheet_tflops(device: torch.device) -> float | None:
    """Peak of dense bf16 products; None where no datasheet is known."""
    if device.type != "cuda":
        return None
    peaks = peaks_of(torch.cuda.get_device_name(device))
    return float(peaks.bf16) if peaks else None


@cache
def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of one large matrix product of random numbers on this machine."""
    size = _PRODUCT_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(left, right)
    best_s = min(_time_product(left, right) for _ in range(5))
    return 2 * size**3 / best_s / 1e12


def _time_product(left: torch.Tensor, right: torch.Tensor) -> float:
    synchronize(left.device)
    start_s = time.perf_counter()
    torch.mm(left, right)
    synchronize(left.device)
    return time.perf_counter() - start_s


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed_of(
    shape: ModelSpec,
    tokens: int,
    work: UpdateWork,
    elapsed_s: float,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int,
) -> dict[str, float]:
    """Speed of one update, for `timings.jsonl`. `tokens` is the number of tokens of all documents, however few of them had to
    be computed; operations are those that were made."""
    tflops = flops_of(shape, work) / elapsed_s / 1e12 / ranks
    found = {
        "compute_s": elapsed_s,
        "tokens_per_s": tokens / elapsed_s,
        "shared_tokens": tokens - work.tokens,
        "tflops_per_rank": tflops,
        "mfu_measured": tflops / measured_tflops(device, dtype),
    }
    if (peak := datasheet_tflops(device)) is not None:
        found["mfu_datasheet"] = tflops / peak
    return found
