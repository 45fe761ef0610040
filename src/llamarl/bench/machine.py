"""The measured limits of this machine, to which other figures are compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import Struct

from llamarl.plan.gpus import Gpu, Rates
from llamarl.train.speed import synchronize


class Ceilings(Struct, frozen=True):
    """The highest rates that this machine reaches."""

    flops: float  # operations per second of a large matrix product
    bytes: float  # bytes per second that a large copy reads and writes

    def as_gpu(self, name: str, precision: str) -> Gpu:
        """This machine as a description for the cost model."""
        return Gpu(
            name=name,
            memory_gib=0.0,
            tflops=Rates(**{precision: self.flops / 1e12}),
            memory_gb_s=self.bytes / 1e9,
            product_share=1.0,
            memory_share=1.0,
        )


Clock = Callable[[], float]


_COPIES = 4  # timed together: a single one takes so little that waiting for its end shows


def measure_ceilings(device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter) -> Ceilings:
    """Measure with random numbers, since a product or copy of zeros is faster than real work."""
    size, length = (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 26)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_s = best_s(lambda: _product(left, right), device, clock=clock)
    source = torch.randint(0, 255, (length,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(_COPIES):
            target.copy_(source)

    copy_s = best_s(copies, device, clock=clock) / _COPIES
    return Ceilings(flops=2 * size**3 / product_s, bytes=2 * length / copy_s)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype != torch.float8_e4m3fn:
        return torch.mm(left, right)
    one = torch.ones((), device=left.device)
    return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


class KernelTimes:
    """Profiles the device's kernels and the host's calls between `start` and `stop`."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity.CUDA if self._on_gpu else torch.profiler.ProfilerActivity.CPU
        self._profiler = torch.profiler.profile(activities=[activity])

    def start(self) -> None:
        self._profiler.start()
        self._start_s = time.perf_counter()

    def stop(self) -> None:
        self._wall_ms = 1e3 * (time.perf_counter() - self._start_s)
        self._profiler.stop()

    def table(self, rows: int = 30) -> str:
        events = self._profiler.key_averages()
        device = [(event.key, float(getattr(event, "self_device_time_total", 0.0)), event.count) for event in events]
        host = [(event.key, float(getattr(event, "self_cpu_time_total", 0.0)), event.count) for event in events]
        kernels, calls = ([row for row in device if row[1]], host) if self._on_gpu else (host, [])
        total_us = sum(spent_us for _, spent_us, _ in kernels)
        lines = _longest(kernels, rows, total_us)
        lines.append(f"{total_us / 1e3:9.2f} ms in all kernels, {self._wall_ms:.2f} ms by the clock")
        if calls:
            lines += ["calls of the host:", *_longest(calls, 5, 1e3 * self._wall_ms)]
        return "\n".join(lines)


def kernel_times(action: Callable[[], object]) -> str:
    """A table of the kernels that an action spends the most time in."""
    times = KernelTimes()
    times.start()
    action()
    times.stop()
    return times.table()


def _longest(rows: list[tuple[str, float, int]], count: int, whole_us: float) -> list[str]:
    longest = sorted(rows, key=lambda row: -row[1])[:count]
    return [f"{spent / 1e3:9.2f} ms {spent / whole_us:6.1%} {times:5}x  {key[:110]}" for key, spent, times in longest]


def best_s(
    action: Callable[[], object], device: torch.device, times: int = 10, clock: Clock = time.perf_counter
) -> float:
    """Seconds of one run: the median of several, after a warm-up."""
    for _ in range(2):
        action()
    found = []
    for _ in range(times):
        synchronize(device)
        start_s = clock()
        action()
        synchronize(device)
        found.append(clock() - start_s)
    return sorted(found)[len(found) // 2]


def process_age_s() -> float:
    """Seconds since the start of this process, including imports."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the memory allocated on a GPU, or of this process's resident memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
