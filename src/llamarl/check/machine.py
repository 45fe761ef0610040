"""This machine: facts about it, read once, and what they mean for a job."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from llamarl.check.finding import Finding, gib
from llamarl.machine import GIB, FreeMemory, host_memory

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
EXTRAS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "math": "math_verify",
    "judge": "httpx",
    "hub": "huggingface_hub",
    "data": "pyarrow",
    "gguf": "gguf",
    "serve": "uvicorn",
    "reasoning-gym": "reasoning_gym",
    "verifiers": "zmq",
    "monarch": "monarch",
}
"""Extras of the package, and the module by which each is recognized."""
_COMPUTE_CAPABILITY = (8, 0)  # the oldest generation with bf16
_LITTLE_MEMORY, _LITTLE_DISK, _LITTLE_SHARED = 4 * GIB, 10 * GIB, 64 << 20
_USUAL_FILES = 1024


class GpuFacts(Struct, frozen=True):
    """A GPU as torch sees it."""

    name: str
    total_bytes: float
    free_bytes: float
    capability: tuple[int, int] = (9, 0)


class MachineFacts(Struct, frozen=True, kw_only=True):
    """What a check needs to know of a machine."""

    python: str
    torch: str  # version; empty: not installed
    cuda: str = ""  # CUDA version of torch's build; empty: a CPU build
    driver: str = ""  # version of NVIDIA's driver; empty: there is none
    cuda_error: str = ""  # why torch cannot use the GPUs of this machine
    gpus: tuple[GpuFacts, ...] = ()
    cores: int
    memory: FreeMemory
    shared: FreeMemory  # /dev/shm
    disk_folder: str  # the folder that a run folder would be made in
    disk_free_bytes: float
    disk_writable: bool = True
    open_files: int  # limit of this process
    interfaces: tuple[str, ...] = ()  # network interfaces besides loopback
    extras: tuple[str, ...] = ()  # installed extras


def machine_facts(run: Path) -> MachineFacts:
    """Facts about this machine, for a run folder at `run`, which need not exist."""
    folder = _existing(run)
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    version, build, gpus, error = _torch_facts()
    return MachineFacts(
        python=platform.python_version(),
        torch=version,
        cuda=build,
        driver=_driver(),
        cuda_error=error,
        gpus=gpus,
        cores=len(os.sched_getaffinity(0)),
        memory=host_memory(),
        shared=FreeMemory(shared.total, shared.free) if shared else FreeMemory(0, 0),
        disk_folder=str(folder),
        disk_free_bytes=shutil.disk_usage(folder).free,
        disk_writable=os.access(folder, os.W_OK | os.X_OK),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        interfaces=tuple(name for _, name in socket.if_nameindex() if name != "lo"),
        extras=tuple(name for name, module in EXTRAS.items() if importlib.util.find_spec(module) is not None),
    )


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def _driver() -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", NVIDIA_DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else "unknown"


def _torch_facts() -> tuple[str, str, tuple[GpuFacts, ...], str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return "", "", (), str(error)
    build = torch.version.cuda or ""
    try:
        gpus = [_gpu(index) for index in range(torch.cuda.device_count() if build else 0)]
    except RuntimeError as error:
        return torch.__version__, build, (), " ".join(str(error).split())[:200]
    return torch.__version__, build, tuple(gpus), ""


def _gpu(index: int) -> GpuFacts:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return GpuFacts(torch.cuda.get_device_name(index), total, free, torch.cuda.get_device_capability(index))


def judge_machine(facts: MachineFacts) -> Iterator[Finding]:
    """Yield a line for everything that was looked at."""
    if not facts.torch:
        yield Finding("torch", "problem", f"cannot be imported: {facts.cuda_error}", "pip install 'torch>=2.11,<2.14'")
    else:
        build = f"CUDA {facts.cuda}" if facts.cuda else "CPU build"
        yield Finding("torch", "ok", f"{facts.torch} ({build}), Python {facts.python}")
    yield from _judge_gpus(facts)
    yield Finding("CPU", "ok", f"{facts.cores} cores")
    yield _judge_memory(facts.memory)
    yield _judge_shared(facts)
    yield _judge_disk(facts)
    if facts.open_files < _USUAL_FILES:
        yield Finding("open files", "warning", f"at most {facts.open_files}", "raise the limit: ulimit -n 4096")
    else:
        yield Finding("open files", "ok", f"at most {facts.open_files}")
    named = ", ".join(facts.interfaces)
    yield Finding("network", "ok", f"interfaces: {named}" if named else "loopback only: jobs on this machine alone")
    missing = [name for name in EXTRAS if name not in facts.extras]
    yield Finding(
        "extras", "ok", f"installed: {', '.join(facts.extras) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    )


def _judge_gpus(facts: MachineFacts) -> Iterator[Finding]:
    if facts.driver and not facts.cuda and facts.torch:
        yield Finding(
            "GPU",
            "warning",
            f"there is one (driver {facts.driver}), but this torch is a CPU build, so everything computes on the CPU",
            "install the CUDA build: pip install --force-reinstall 'torch>=2.11,<2.14' --index-url https://pypi.org/simple",
        )
    elif facts.driver and not facts.gpus:
        yield Finding(
            "GPU",
            "problem",
            f"the driver ({facts.driver}) is there, but torch (CUDA {facts.cuda}) finds no GPU{_because(facts)}",
            "see nvidia-smi and CUDA_VISIBLE_DEVICES; an old driver needs an update",
        )
    elif not facts.gpus:
        yield Finding("GPU", "ok", "none: everything computes on the CPU")
    for number, gpu in enumerate(facts.gpus):
        told = f"{gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free, driver {facts.driver or 'unknown'}"
        if gpu.capability < _COMPUTE_CAPABILITY:
            told += f", compute capability {gpu.capability[0]}.{gpu.capability[1]}"
            yield Finding(f"cuda:{number}", "warning", told, "it has no bf16, so set trainer.dtype and generator.dtype")
        elif gpu.free_bytes < 0.9 * gpu.total_bytes:
            yield Finding(f"cuda:{number}", "warning", told, "other programs use it: nvidia-smi names them")
        else:
            yield Finding(f"cuda:{number}", "ok", told)


def _because(facts: MachineFacts) -> str:
    return f": {facts.cuda_error}" if facts.cuda_error else ""


def _judge_memory(memory: FreeMemory) -> Finding:
    told = f"{gib(memory.available_bytes)} of {gib(memory.total_bytes)} free"
    if memory.available_bytes < _LITTLE_MEMORY:
        return Finding("memory", "warning", told, "little even for small models; end other programs")
    return Finding("memory", "ok", told)


def _judge_shared(facts: MachineFacts) -> Finding:
    told = f"{gib(facts.shared.available_bytes)} free in {SHARED_MEMORY}"
    if facts.shared.available_bytes < _LITTLE_SHARED:
        return Finding("shared", "warning", told, "NCCL needs more for several GPUs: docker run --shm-size=1g")
    return Finding("shared", "ok", told)


def _judge_disk(facts: MachineFacts) -> Finding:
    told = f"{gib(facts.disk_free_bytes)} free at {facts.disk_folder}"
    if not facts.disk_writable:
        return Finding(
            "disk", "problem", f"{facts.disk_folder} cannot be written", "name another folder with --run DIR"
        )
    if facts.disk_free_bytes < _LITTLE_DISK:
        return Finding("disk", "warning", told, "snapshots of large models need more")
    return Finding("disk", "ok", told)
