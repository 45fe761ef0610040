"""Which device a command computes on, chosen and said."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from llamarl.errors import InputError

DeviceOption = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N")]

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def device_or_refuse(device: str) -> str:
    """The device by its own name: what `auto` means here, or what was asked for, if it can be used."""
    import torch

    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise InputError(f"--device {device}: expected auto, cpu, cuda or cuda:N")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: cannot be used here ({str(error).splitlines()[0]})") from None
    return device


def describe_device(device: str) -> str:
    """With the GPU's name, or the reason why a GPU that is there is not used."""
    import torch

    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    unused = _NVIDIA_DRIVER.exists() and torch.version.cuda is None
    return f"{device} (there is a GPU, but this torch is a CPU build)" if unused else device


def say_device(device: str, precision: str) -> None:
    print(f"device: {describe_device(device)}, {precision}", file=sys.stderr, flush=True)
