"""From a config to each executor's insides. Called in the process where the executor will live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llamarl.algo.losses import LOSSES, Loss
from llamarl.config import Config
from llamarl.errors import ConfigError
from llamarl.executors.executor import Executor
from llamarl.executors.generator import Generator
from llamarl.executors.reward import Reward
from llamarl.executors.trainer import Trainer
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
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


Builder = Callable[[Site], Executor]


def build_generator(site: Site) -> Executor:
    config = site.config
    model = load_model(config.model_folder)
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
    model = load_model(config.model_folder)
    return Trainer(
        model,
        SlotWriter(site.slots["trainer"], dict(model.named_parameters()), lease_s=config.weights.lease_s),
        make_loss(config),
        settings=config.trainer,
        algo=config.algo,
        temperature=config.generator.temperature,
        updates=config.schedule.updates,
        carry_from=config.model_folder,
    )


def make_loss(config: Config) -> Loss:
    name = config.algo.loss
    if is_reference(name):
        return load_function("algo.loss", name)
    if name not in LOSSES:
        raise ConfigError(f"algo.loss: unknown loss '{name}'; known: {', '.join(LOSSES)}, or FILE.py:FUNCTION")
    return LOSSES[name]


BUILDERS: dict[str, Builder] = {"generator": build_generator, "reward": build_reward, "trainer": build_trainer}
