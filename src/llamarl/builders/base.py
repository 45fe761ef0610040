"""The frozen base of a job with adapters: one copy on each device, whoever computes with it there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, dtype_of, generator_devices, trainer_devices
from llamarl.config import Config
from llamarl.errors import ConfigError
from llamarl.model.base import Base, BaseLayout, BasePrecision, read_base
from llamarl.model.checkpoint import open_checkpoint
from llamarl.weights.shared_memory import private_memory, shared_memory


def load_base(context: BuildContext, folder: Path, device: torch.device, dtype: torch.dtype) -> Base:
    """The base in the given type. All executors that ask for the same one on the same device of a host share it."""
    checkpoint = open_checkpoint(folder)
    layout = BaseLayout(checkpoint.shape, dtype, base_precision(context.config))
    device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    name = f"{folder.resolve()}/{layout.digest}"

    def fill(memory: torch.Tensor) -> None:
        read_base(checkpoint, layout, memory)

    if not context.slots:
        return Base(layout, private_memory(device, layout.num_bytes, fill))
    file = next(iter(context.slots.values()))
    return Base(layout, shared_memory(file, name, device, layout.num_bytes, fill))


def check_base(config: Config) -> None:
    """Refuses a base whose precision is not that of the passes here, before anything starts."""
    for key, settings in (("trainer", config.trainer), ("generator", config.generator)):
        dtype = dtype_of(settings.dtype, device_of(f"{key}.device", settings.device))
        if config.model.base == "bf16" and dtype != torch.bfloat16:
            raise ConfigError(f"model.base: bf16, but {key}.dtype is {_name(dtype)} here; set it to bfloat16")


def base_precision(config: Config) -> BasePrecision:
    return "fp8" if config.model.base == "fp8" else "wide"


def generator_has_base(config: Config) -> bool:
    """Whether the generators compute with the base as it is: whole, and not with narrow weights of their own."""
    return bool(config.model.lora) and config.generator.tensor == 1 and config.generator_quantize == _quantized(config)


def trainer_has_base(config: Config) -> bool:
    """Whether the trainer computes with the base as it is, and not with shards of it."""
    return bool(config.model.lora) and config.trainer.ranks == 1


def _quantized(config: Config) -> str:
    return "fp8" if config.model.base == "fp8" else "none"


def why_two_bases(config: Config, first_gpus: Mapping[str, int]) -> str:
    """Why trainer and generators do not share one base; empty if they do."""
    trainer, generator = trainer_devices(config, first_gpus)[0], set(generator_devices(config, first_gpus))
    types = [
        dtype_of(settings.dtype, device_of(f"{key}.device", settings.device))
        for key, settings in (("trainer", config.trainer), ("generator", config.generator))
    ]
    if not generator:
        return "there are no generators"
    if config.engine.hosts:
        return "they may be on different hosts"
    if not trainer_has_base(config):
        return f"the trainer's {config.trainer.ranks} ranks hold shards of it"
    if config.generator.tensor > 1:
        return f"the generators' {config.generator.tensor} ranks hold shards of it"
    if not generator_has_base(config):
        return f"generator.quantize={config.generator.quantize} gives the generators narrow weights of their own"
    if types[0] != types[1]:
        return f"trainer.dtype is {_name(types[0])} and generator.dtype {_name(types[1])}"
    if trainer not in generator:
        return f"the trainer is on {trainer}, the generators on {', '.join(sorted(map(str, generator)))}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_base(config: Config, first_gpus: Mapping[str, int]) -> list[str]:
    """One line that says whether trainer and generators share their base; none without adapters."""
    if not config.model.lora or not config.samples:
        return []
    why = why_two_bases(config, first_gpus)
    return [f"trainer and generators hold a base each: {why}" if why else "trainer and generators share one base"]
