"""Choosing the device that a command computes on, and saying which it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

DeviceOption = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N")]

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def device_or_refuse(device: str) -> str:
    """What `auto` means here, or the device asked for if it can be used."""
    from llamarl.generate.llm import choose_device

    return choose_device(device, "--device")


def describe_device(device: str) -> str:
    """The device with the GPU's name, or with the reason why a GPU of this machine is not used."""
    import torch

    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    unused = _NVIDIA_DRIVER.exists() and torch.version.cuda is None
    return f"{device} (there is a GPU, but this torch is a CPU build)" if unused else device


def say_device(device: str, precision: str) -> None:
    print(f"device: {describe_device(device)}, {precision}", file=sys.stderr, flush=True)
