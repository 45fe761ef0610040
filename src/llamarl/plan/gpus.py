"""What a GPU (or a CPU) can do, and how much of that our programs reach: from a datasheet, or measured.

`llamarl bench --calibrate` writes such a description as JSON; `llamarl plan` and `llamarl simulate` read it with `--gpu`.
A time is a sum of terms (`terms.py`); each term says what the hardware would need at best, or counts something, and is
multiplied by the factor given here under its name.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec
from msgspec import Struct

from llamarl.errors import InputError
from llamarl.layout.cost import Links

GIB = 1 << 30


class Factors(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each term of a time is multiplied with. Those of the first kind are 1 for a program that loses nothing; those
    that end in _s are seconds for each time something is done."""


class DecodeFactors(Factors, frozen=True):
    """Of one decode step of one replica. As measured with our generator on one H200 (benchmarks/results/decode.md)."""

    products: float = 1.0
    cache: float = 0.95
    traffic: float = 1.2
    scores: float = 1.2
    layer_s: float = 33e-6  # for each layer: what the many small kernels of a CUDA graph take at least
    step_s: float = 100e-6
    row_s: float = 0.0  # for each row: the host's book-keeping, which a GPU does not wait for
    prefill: float = 1.0  # of reading prompts, whose terms are those of a step and of training's attention


class TrainFactors(Factors, frozen=True):
    """Of one update of one rank. As measured with our trainer on one H200 (benchmarks/results/train.md)."""

    products: float = 1.07
    attention: float = 6.0
    traffic: float = 1.2
    optimizer: float = 1.2
    layer_s: float = 100e-6  # for each layer and pass: launching its kernels, as far as the GPU waits for it
    update_s: float = 10e-3


class EngineFactors(Factors, frozen=True):
    """What controller, messages and the record cost. Measured on a CPU (benchmarks/results/engine_overhead.md)."""

    group_s: float = 60e-6  # the controller's work on one group, from admission to retirement, ledger included
    message_s: float = 0.7e-3  # from one executor to the next by way of the controller
    update_s: float = 4e-3  # ledger and store reach the disk
    score_s: float = 0.2e-3  # judging one answer by a rule
    copy: float = 1.1  # of weights, against a plain copy of as many bytes; a publication and a load are one each
    copy_s: float = 0.3e-3


class Rates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TFLOP/s of dense products by precision; 0: it has none."""

    fp32: float = 0.0
    bf16: float = 0.0
    fp8: float = 0.0


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    memory_gib: float
    tflops: Rates
    memory_gb_s: float  # read and written together
    nvlink_gb_s: float = 0.0  # of each GPU and direction, inside a host
    nic_gb_s: float = 50.0  # the same between hosts
    gpus_per_host: int = 8
    host_hops: float = 1.0  # how many times longer than stated a collective's step between hosts takes
    product_share: float = 0.79  # of `tflops` that a large product really reaches
    memory_share: float = 0.87  # of `memory_gb_s` that a large copy really reaches
    cores: int = 0  # of a CPU, which executors share; 0: it is a GPU
    threads: int = 0  # of the process that was measured (CPU)
    decode: DecodeFactors = DecodeFactors()
    train: TrainFactors = TrainFactors()
    engine: EngineFactors = EngineFactors()
    source: str = "datasheet"

    @property
    def is_cpu(self) -> bool:
        return self.cores > 0

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def bytes_per_s(self) -> float:
        """That one large copy moves, in both directions together."""
        return self.memory_gb_s * self.memory_share * 1e9

    def flops(self, precision: str) -> float:
        """Per second, of one large product."""
        rate: float = getattr(self.tflops, precision)
        if not rate:
            raise InputError(f"--gpu {self.name}: has no {precision} products; it has {', '.join(self.precisions)}")
        return rate * self.product_share * 1e12

    @property
    def precisions(self) -> list[str]:
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
    """A GPU by name, or the JSON file that `llamarl bench --calibrate` wrote."""
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
