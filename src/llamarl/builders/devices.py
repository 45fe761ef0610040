"""Which device and data type each executor computes with."""

from __future__ import annotations

import torch

from llamarl.builders.site import Site
from llamarl.config import Config
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


def gpu_for(site: Site, role: str, number: int) -> int:
    """The GPU that the engine chose for this rank, or else, on one host, the next one of its role."""
    return first_gpu(site.config, role) + number if site.gpu is None else site.gpu


def first_gpu(config: Config, role: str) -> int:
    """Number of a role's first GPU. Side by side, roles have their own, the trainer's first; co-located, they share them."""
    if config.placement == "colocated":
        return 0
    taken = {
        "trainer": config.trainer.ranks,
        "generator": config.generator.replicas * config.generator.tensor,
        "reference": config.reference.ranks if config.reference_alone else 0,
        "reward_model": 1,
    }
    roles = list(taken)
    return sum(taken[before] for before in roles[: roles.index(role)])


def generator_devices(config: Config) -> list[torch.device]:
    """The device of each rank of each replica, on one host."""
    first, count = first_gpu(config, "generator"), config.generator.replicas * config.generator.tensor
    return [device_of("generator.device", config.generator.device, first + number) for number in range(count)]


def trainer_devices(config: Config) -> list[torch.device]:
    """The device of each rank, on one host."""
    first = first_gpu(config, "trainer")
    return [device_of("trainer.device", config.trainer.device, first + rank) for rank in range(config.trainer.ranks)]


def describe_devices(config: Config) -> list[str]:
    """One line that says which devices generator and trainer compute on; empty without a GPU here, or if hosts are named."""
    if not torch.cuda.device_count() or config.engine.hosts:
        return []
    sides = (generator_devices(config), trainer_devices(config))
    generator, trainer = (", ".join(dict.fromkeys(map(str, devices))) for devices in sides)
    return [f"generator on {generator}; trainer on {trainer}"]
