"""Everything that is checked before a job starts: what a user can get wrong is told here, in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.builders.base import check_base, describe_base
from llamarl.builders.compute import check_training
from llamarl.builders.context import Builder
from llamarl.builders.critic import check_critic
from llamarl.builders.devices import check_gpus, describe_devices, device_of
from llamarl.builders.loss import check_loss
from llamarl.builders.registry import builder_reference
from llamarl.builders.reward_model import check_reward_model
from llamarl.builders.teacher import check_teachers
from llamarl.builders.weights import weight_transport
from llamarl.config import Config, ScheduleConfig
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.line import Line
from llamarl.engine.local.mps import describe_mps
from llamarl.engine.monarch.install import check_engine
from llamarl.engine.prompts import Prompts, check_lengths
from llamarl.engine.rows import open_rows, with_epochs
from llamarl.errors import ConfigError
from llamarl.jobs.memory_check import check_memory
from llamarl.jobs.model_check import check_model
from llamarl.jobs.task_check import check_agent, check_tool, prepare_prompts
from llamarl.model.hf_config import read_shape
from llamarl.observe.advice import advice_before
from llamarl.observe.loggers import check_loggers
from llamarl.observe.metric_logger import MetricLogger
from llamarl.tasks.task import Prompter


@dataclass(frozen=True)
class PreparedJob:
    """A job that has passed all checks and can be run."""

    config: Config
    line: Line
    builders: Mapping[str, Builder]  # by role
    given: Mapping[str, Callable[..., Any]]  # scorers given from Python
    prompts: Prompts
    notes: tuple[str, ...]  # shown once, when the job begins
    loggers: tuple[MetricLogger, ...] = ()  # given from Python, besides those of the config

    @property
    def training_roles(self) -> tuple[str, ...]:
        return tuple(role.name for role in self.line.batch_roles)

    @property
    def builder_references(self) -> dict[str, str]:
        """FILE.py:FUNCTION of every role's builder."""
        return {role.name: builder_reference(role.name, self.builders[role.name]) for role in self.line.roles}


def prepare_job(
    config: Config,
    line: Line,
    builders: Mapping[str, Builder],
    given: Mapping[str, Callable[..., Any]],
    task: Prompter | None,
    loggers: Sequence[MetricLogger] = (),
) -> PreparedJob:
    _check_builders(config, line, builders)
    check_engine(config.engine)
    tokenizer, model_notes = check_model(config)
    rows = open_rows(config, tokenizer, read_shape(config.model_folder).max_positions)
    config = with_epochs(config, rows, usual=ScheduleConfig().updates)
    device, tensor = device_of("generator.device", config.generator.device), config.generator.tensor
    check_gpus(f"generator.tensor: {tensor}", tensor, device, config)
    check_training(config)
    check_teachers(config, tokenizer)
    check_critic(config, tokenizer)
    check_base(config)
    if config.reward_model.path:
        check_reward_model(config)
    gpus = first_gpus(line, config.placement)
    weight_transport(config, gpus, can_reach=lambda reader, writer: True)
    memory_notes = check_memory(config)
    check_loggers(config.observe)
    loss_notes = check_loss(config)
    prompts = prepare_prompts(config, tokenizer, given, task, rows)
    check_tool(config, tokenizer, prompts.problem(0))
    check_agent(config, tokenizer)
    notes = [
        *describe_devices(config, gpus),
        *describe_mps(config, gpus),
        *describe_base(config, gpus),
        *model_notes,
        *memory_notes,
        *loss_notes,
        *advice_before(config),
    ]
    notes += [*prompts.notes, *([] if config.agent else check_lengths(prompts, config))]  # agents write their prompts
    return PreparedJob(config, line, builders, given, prompts, tuple(notes), tuple(loggers))


def _check_builders(config: Config, line: Line, builders: Mapping[str, Builder]) -> None:
    """Every role needs one, and, unless all run in this process, one that other processes can load."""
    if missing := {role.name for role in line.roles} - builders.keys():
        raise ConfigError(f"line: no builder for role '{sorted(missing)[0]}'")
    if config.engine.kind != "inline":
        for role in line.roles:
            builder_reference(role.name, builders[role.name])
