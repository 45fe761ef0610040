"""Descriptions of GPUs (or a CPU): what the hardware can do, and how much of it our code reaches; stated or measured.

`llamarl bench --calibrate` writes such a description as JSON; `llamarl plan` and `llamarl simulate` read it with `--gpu`.
A time is a sum of terms (`terms.py`). Each term is the hardware's best time for something, or a count, and is multiplied by
the factor of the same name here.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamarl.errors import InputError
from llamarl.layout.cost import Links
from llamarl.machine import GIB


class Factors(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors of the terms of a time. A plain factor is 1 for perfect code; one that ends in _s is seconds per event."""


class DecodeFactors(Factors, frozen=True):
    """Factors of a decode step of one replica, measured with our generator on one H200 (benchmarks/results/decode.md)."""

    products: float = 1.0
    cache: float = 0.95
    traffic: float = 1.2
    scores: float = 1.2
    layer_s: float = 33e-6  # per layer: least time of the many small kernels in a CUDA graph
    step_s: float = 100e-6
    narrow_s: float = 0.0  # per layer with fp8 weights: quantizing the inputs of its products
    row_s: float = 0.0  # per row: bookkeeping on the host, which a GPU does not wait for
    prefill: float = 1.0  # factor on reading prompts, whose terms are those of a step and of training attention


class TrainFactors(Factors, frozen=True):
    """Factors of an update on one rank, measured with our trainer on one H200 (benchmarks/results/train.md)."""

    products: float = 1.07
    attention: float = 6.0
    traffic: float = 1.2
    optimizer: float = 1.2
    layer_s: float = 100e-6  # per layer and pass: kernel launches that the GPU waits for
    update_s: float = 10e-3


class EngineFactors(Factors, frozen=True):
    """Costs of controller, messages and records, measured on a CPU (benchmarks/results/engine_overhead.md)."""

    group_s: float = 60e-6  # the controller's work per group, from admission to retirement, with the ledger
    message_s: float = 0.7e-3  # a message from one executor to the next through the controller
    update_s: float = 4e-3  # writing ledger and store to disk
    score_s: float = 0.2e-3  # scoring one answer by a rule
    copy: float = 1.1  # a publication or a load of weights, relative to a plain copy of the same bytes
    copy_s: float = 0.3e-3


class BesideFactors(Factors, frozen=True):
    """How fast each role computes while both do on one GPU side by side (engine.mps), of its speed with the GPU to itself; in
    time slices each has a half. From one job on one H200 (docs/planner.md)."""

    generator: float = 0.32
    trainer: float = 0.81

    trainer_on_part: float = (
        1.13  # of its speed alone, over its share of the multiprocessors: fewer have a higher clock
    )

    def with_trainer_share(self, share: float) -> BesideFactors:
        """With a trainer on a part of the multiprocessors (engine.mps_trainer_share)."""
        return replace(self, generator=1 - (1 - self.generator) * share, trainer=self.trainer * share)

    def trainer_alone(self, share: float) -> float:
        """Its speed on that part while no generator computes."""
        return min(1.0, self.trainer_on_part * share)


class Rates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TFLOP/s of dense products by precision; 0 if not supported."""

    fp32: float = 0.0
    bf16: float = 0.0
    fp8: float = 0.0


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU, or the CPU of a machine, with its memory, rates, links and factors."""

    name: str
    memory_gib: float
    tflops: Rates
    memory_gb_s: float  # memory bandwidth, reads and writes together
    nvlink_gb_s: float = 0.0  # bandwidth inside a host, per GPU and direction
    nic_gb_s: float = 50.0  # bandwidth between hosts, per GPU and direction
    gpus_per_host: int = 8
    host_hops: float = 1.0  # factor on the time of a collective's step between hosts
    product_share: float = 0.79  # share of `tflops` that a large product reaches
    memory_share: float = 0.87  # share of `memory_gb_s` that a large copy reaches
    cores: int = 0  # cores of a CPU, which executors share; 0: this is a GPU
    threads: int = 0  # CPU: threads of the process that was measured
    decode: DecodeFactors = DecodeFactors()
    train: TrainFactors = TrainFactors()
    engine: EngineFactors = EngineFactors()
    beside: BesideFactors = BesideFactors()
    source: str = "datasheet"

    @property
    def is_cpu(self) -> bool:
        return self.cores > 0

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a large copy reads and writes."""
        return self.memory_gb_s * self.memory_share * 1e9

    def flops(self, precision: str) -> float:
        """Floating-point operations per second of a large product."""
        rate: float = getattr(self.tflops, precision)
        if not rate:
            raise InputError(f"{self.name} has no {precision} products; it has {', '.join(self.precisions)}")
        return rate * self.product_share * 1e12

    @property
    def precisions(self) -> list[str]:
        """Precisions that it has products for."""
        return [name for name in Rates.__struct_fields__ if getattr(self.tflops, name)]

    @property
    def links(self) -> Links:
        return Links(
            nvlink_gb_s=self.nvlink_gb_s or self.nic_gb_s, nic_gb_s=self.nic_gb_s, gpus_per_host=self.gpus_per_host
        )


# Dense peaks from the vendors' datasheets, by a part of the device's name.
PEAKS: dict[str, Rates] = {
    "A100": Rates(bf16=312, fp32=19.5),
    "H100": Rates(bf16=989, fp8=1979, fp32=67),
    "H100 PCIe": Rates(bf16=756),
    "H200": Rates(bf16=989, fp8=1979, fp32=67),
    "GH200": Rates(bf16=989, fp8=1979, fp32=67),
    "B200": Rates(bf16=2250, fp8=4500, fp32=75),
    "L40S": Rates(bf16=362, fp8=733, fp32=91.6),
    "L4": Rates(bf16=121),
    "A10": Rates(bf16=125),
}


def peaks_of(device_name: str) -> Rates | None:
    """Peaks of a device by the name that its driver reports; the longest match counts."""
    found = [part for part in PEAKS if part in device_name]
    return PEAKS[max(found, key=len)] if found else None


def _gpu(product: str, gib: float, gb_s: float, nvlink: float, nic: float = 50.0) -> Gpu:
    return Gpu(
        name=product.lower(), memory_gib=gib, tflops=PEAKS[product], memory_gb_s=gb_s, nvlink_gb_s=nvlink, nic_gb_s=nic
    )


# Datasheets of the SXM or HGX forms: GB/s of memory, GB/s of NVLink in each direction (the L40S has none: PCIe 4.0 x16), one
# 400 Gbit/s NIC for each GPU (A100 and L40S: 200).
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 80, 2039, 300, 25),
        _gpu("H100", 80, 3350, 450),
        _gpu("H200", 141e9 / GIB, 4800, 450),
        _gpu("B200", 180e9 / GIB, 7700, 900),
        _gpu("L40S", 48e9 / GIB, 864, 32, 25),
    )
}


def gpu_named(name: str) -> Gpu:
    """The GPU of this name, or of the JSON file that `llamarl bench --calibrate` wrote."""
    if name.endswith(".json"):
        return read_gpu(Path(name))
    try:
        return GPUS[name.lower()]
    except KeyError:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1)
        hint = f"; did you mean '{near[0]}'? Known" if near else "; known"
        raise InputError(
            f"--gpu {name}: unknown{hint}: {', '.join(GPUS)}, or a .json file of `llamarl bench --calibrate`"
        ) from None


def read_gpu(path: Path) -> Gpu:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Gpu)
    except OSError as error:
        raise InputError(f"--gpu {path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise InputError(f"--gpu {path}: not a description by `llamarl bench --calibrate`: {error}") from None


def gpu_to_json(gpu: Gpu) -> bytes:
    return msgspec.json.format(msgspec.json.encode(gpu), indent=2) + b"\n"
