"""From a config to each executor's insides. Called in the process where the executor will live."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from llamarl.algo.losses import LOSSES, Loss
from llamarl.config import Config
from llamarl.controller.line import index_of
from llamarl.errors import ConfigError
from llamarl.executors.executor import Executor
from llamarl.executors.generator import Generator
from llamarl.executors.reward import Reward
from llamarl.executors.trainer import Trainer
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.messages import ReaderStuck, Report
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.training_state import POLICY, restore_optimizer
from llamarl.plugins import is_reference, load_function
from llamarl.tasks.registry import make_scorer
from llamarl.weights.slots import SlotFile, SlotReader, SlotWriter


@dataclass(frozen=True)
class Site:
    """What an executor is built from: the config, its own name, and the weight slots of every role that publishes."""

    config: Config
    executor: str
    slots: Mapping[str, SlotFile]  # by publishing role
    weights_source: Mapping[str, str]  # reading role -> publishing role
    snapshot: Path | None = None  # what a role that trains goes on from; None: from the beginning
    rank: int = 0
    num_ranks: int = 1
    tell_engine: Callable[[Report], None] = lambda report: None  # for words that cannot wait for the end of the work


Builder = Callable[[Site], Executor]


def build_generator(site: Site) -> Executor:
    config = site.config
    model = load_model(
        config.model_folder, device=device_of("generator.device", config.generator.device, index_of(site.executor))
    )
    decoder = ContinuousDecoder(
        model,
        slots=config.generator.slots,
        max_prompt_tokens=config.generator.max_prompt_tokens,
        max_new_tokens=config.generator.max_new_tokens,
        eos_ids=Tokenizer.load(config.model_folder).eos_ids,
        seed=config.seed,
    )
    slots = site.slots[site.weights_source["generator"]]
    return Generator(decoder, SlotReader(slots, dict(model.named_parameters())))


def build_reward(site: Site) -> Executor:
    return Reward(Tokenizer.load(site.config.model_folder), make_scorer(site.config.reward))


def build_trainer(site: Site) -> Executor:
    config = site.config
    folder = site.snapshot / POLICY if site.snapshot else config.model_folder
    model = load_model(folder, device=device_of("trainer.device", config.trainer.device))
    trainer = Trainer(
        model,
        SlotWriter(
            site.slots["trainer"],
            dict(model.named_parameters()),
            lease_s=config.weights.lease_s,
            on_stuck=lambda pid: site.tell_engine(ReaderStuck(pid)),
        ),
        make_loss(config),
        settings=config.trainer,
        algo=config.algo,
        temperature=config.generator.temperature,
        updates=config.schedule.updates,
        carry_from=config.model_folder,
    )
    if site.snapshot:
        restore_optimizer(model, trainer.optimizer, site.snapshot)
    return trainer


def device_of(key: str, setting: str, replica: int = 0) -> torch.device:
    """`auto` takes a GPU where there is one, and spreads replicas over all of them."""
    count = torch.cuda.device_count()
    if setting == "auto":
        return torch.device("cuda", replica % count) if count else torch.device("cpu")
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"{key}: {setting} was asked for, but there are {count} CUDA devices here")
    return device


def make_loss(config: Config) -> Loss:
    name = config.algo.loss
    if is_reference(name):
        return load_function("algo.loss", name)
    if name not in LOSSES:
        raise ConfigError(f"algo.loss: unknown loss '{name}'; known: {', '.join(LOSSES)}, or FILE.py:FUNCTION")
    return LOSSES[name]


def builder_reference(role: str, builder: Builder) -> str:
    """How another process finds the builder: by the file it is written in."""
    name = getattr(builder, "__qualname__", "")
    file = inspect.getsourcefile(builder)
    if not name.isidentifier() or file is None:
        raise ConfigError(
            f"line: the builder of '{role}' must be a function at the top of a file, so that a process can load it"
        )
    return f"{file}:{name}"


def load_builder(reference: str) -> Builder:
    file, _, name = reference.rpartition(":")
    if Path(file) == Path(__file__):
        builder: Builder = globals()[name]
        return builder
    return load_function("builder", reference)


BUILDERS: dict[str, Builder] = {"generator": build_generator, "reward": build_reward, "trainer": build_trainer}
