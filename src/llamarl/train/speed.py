"""Speed of training against the peak of the hardware: floating-point operations, MFU, memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache

import torch

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.families.adapters import num_adapter_parameters
from llamarl.families.parameters import matrix_parameters
from llamarl.model_spec import ModelSpec
from llamarl.plan.gpus import peaks_of

_PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}


def training_flops(shape: ModelSpec, lengths: Iterable[int], lora: LoraConfig = NO_LORA) -> float:
    """Floating-point operations of an update: 6 per matrix weight and token (forward 2, backward 4, or 2 for a frozen one),
    and 6 per layer, query feature and pair of tokens in causal attention (12 without the causal half). Recomputed work does
    not count."""
    tokens = pairs = 0
    for length in lengths:
        tokens += length
        pairs += length * length
    products = (4.0 if lora else 6.0) * matrix_parameters(shape) + 6.0 * num_adapter_parameters(shape, lora)
    return products * tokens + 6.0 * shape.num_layers * shape.q_size * pairs


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
    shape: ModelSpec, lengths: Iterable[int], elapsed_s: float, device: torch.device, dtype: torch.dtype, ranks: int
) -> dict[str, float]:
    """Speed of one update, for `timings.jsonl`."""
    sizes = list(lengths)
    tflops = training_flops(shape, sizes) / elapsed_s / 1e12 / ranks
    found = {
        "compute_s": elapsed_s,
        "tokens_per_s": sum(sizes) / elapsed_s,
        "tflops_per_rank": tflops,
        "mfu_measured": tflops / measured_tflops(device, dtype),
    }
    if (peak := datasheet_tflops(device)) is not None:
        found["mfu_datasheet"] = tflops / peak
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found
