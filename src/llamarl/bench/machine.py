"""What this machine can do at best, measured: the ceilings that figures are held against."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import Struct


class Ceilings(Struct, frozen=True):
    flops: float  # of a large matrix product, per second
    bytes: float  # read and written by a large copy, per second


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """On random numbers: a product or copy of zeros is quicker than real work."""
    size, length = (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 26)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_s = best_s(lambda: torch.mm(left, right), device)
    source = torch.randint(0, 255, (length,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = best_s(lambda: target.copy_(source), device)
    return Ceilings(flops=2 * size**3 / product_s, bytes=2 * length / copy_s)


def best_s(action: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """Seconds of one run, the median of several after a warm-up."""
    for _ in range(2):
        action()
    found = []
    for _ in range(times):
        synchronize(device)
        start_s = time.perf_counter()
        action()
        synchronize(device)
        found.append(time.perf_counter() - start_s)
    return sorted(found)[len(found) // 2]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def process_age_s() -> float:
    """Since this process was started, the imports included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on a GPU, or resident in memory, so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
