"""Which device and data type each executor computes with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llamarl.builders.context import BuildContext
from llamarl.config import Config
from llamarl.controller.line import index_of, role_of
from llamarl.errors import ConfigError


def device_of(key: str, setting: str, replica: int = 0) -> torch.device:
    """The device that a setting names. `auto` takes a GPU where there is one, and spreads replicas over all of them."""
    count = torch.cuda.device_count()
    if setting == "auto":
        return torch.device("cuda", replica % count) if count else torch.device("cpu")
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"{key}: {setting} was asked for, but there are {count} CUDA devices here")
    return device


def dtype_of(setting: str, device: torch.device) -> torch.dtype:
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, setting)
    return dtype


def check_gpus(what: str, num_ranks: int, device: torch.device, config: Config) -> None:
    """Refuse an executor of more ranks than there are GPUs, unless they may share one: NCCL would."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and num_ranks > count and not config.engine.share_gpus:
        raise ConfigError(
            f"{what} ranks need as many CUDA devices; there are {count} "
            "(engine.share_gpus=true lets ranks share one: correct, but slow)"
        )


def gpu_for(context: BuildContext) -> int:
    """The number of the GPU that this rank takes on its host, if its setting says `auto`."""
    if context.gpu is not None:
        return context.gpu
    role = role_of(context.executor)
    if role not in context.first_gpus:
        raise ConfigError(f"line: '{role}' asks for a GPU, but its role is not declared with gpu=True")
    return context.first_gpus[role] + index_of(context.executor) * context.num_ranks + context.rank


def generator_devices(config: Config, first_gpus: Mapping[str, int]) -> list[torch.device]:
    """The device of each rank of each replica, on one host; none if nothing is sampled."""
    if not config.samples:
        return []
    first, count = first_gpus.get("generator", 0), config.generator.replicas * config.generator.tensor
    return [device_of("generator.device", config.generator.device, first + number) for number in range(count)]


def trainer_devices(config: Config, first_gpus: Mapping[str, int]) -> list[torch.device]:
    """The device of each rank, on one host."""
    first, count = first_gpus.get("trainer", 0), config.trainer.ranks
    return [device_of("trainer.device", config.trainer.device, first + rank) for rank in range(count)]


def describe_devices(config: Config, first_gpus: Mapping[str, int]) -> list[str]:
    """One line that says which devices generator and trainer compute on; empty without a GPU here, or if hosts are named."""
    if not torch.cuda.device_count() or config.engine.hosts:
        return []
    sides = (generator_devices(config, first_gpus), trainer_devices(config, first_gpus))
    generator, trainer = (", ".join(dict.fromkeys(map(str, devices))) for devices in sides)
    return [f"generator on {generator}; trainer on {trainer}" if generator else f"trainer on {trainer}"]
