"""Builds teachers, on the trainer's ranks or on ranks of their own, and checks them before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from llamarl.builders.compute import check_ranks, compute_settings
from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, gpu_for
from llamarl.builders.tokens import check_same_tokens
from llamarl.config import Config
from llamarl.config.teacher import THE_TEACHER
from llamarl.errors import ConfigError, InputError, ModelError
from llamarl.executors.executor import Executor
from llamarl.executors.teacher import Teacher
from llamarl.layout.model import check_shared
from llamarl.model.adapter_folder import check_base_of, check_same, open_adapter
from llamarl.model.base import Base, BaseLayout, read_base
from llamarl.model.checkpoint import check_headers, open_checkpoint
from llamarl.model.hf_config import read_shape
from llamarl.model.tokenizer import Tokenizer
from llamarl.train.endpoint_teacher import EndpointFailed, EndpointTeacher
from llamarl.train.mesh import make_mesh
from llamarl.train.policy import ComputeSettings, Policy, load_policy
from llamarl.train.sent_states import SentTeachers, StateSender, TeacherHead
from llamarl.train.teacher import AdapterTeacher, FrozenPolicy, HostedTeacher, Teachers


def build_teacher(context: BuildContext) -> Executor:
    """One rank of the teachers that have ranks of their own."""
    config, settings = context.config, context.config.teacher
    if settings.url:
        return Teacher(EndpointTeacher(settings))
    device = device_of("teacher.device", settings.device, gpu_for(context))
    mesh = make_mesh(settings.data, settings.tensor, context.rank, device)
    computing = _computing(config, compute_settings(config, device, mesh))
    teachers = {
        name: HostedTeacher(_load(config, folder, computing), offload=False)
        for name, folder in config.teacher_folders.items()
    }
    return Teacher(StateSender(teachers) if settings.sends_states else Teachers(teachers))


def hosted_teachers(config: Config, policy: Policy) -> Teachers | None:
    """The teachers on the ranks of the trainer, whose policy is given; None if they have ranks of their own, or there are
    none."""
    settings = config.teacher
    if not settings or settings.alone:
        return None
    teachers: dict[str, FrozenPolicy] = {}
    if settings.adapter:
        teachers[THE_TEACHER] = AdapterTeacher(policy, adapter_folder(config))
    computing = _computing(config, policy.computing)
    for name, folder in config.teacher_folders.items():
        teachers[name] = HostedTeacher(_load(config, folder, computing), offload=settings.offload)
    return Teachers(teachers, weight=settings.weight, forward=settings.forward)


def sent_teachers(config: Config, policy: Policy) -> SentTeachers | None:
    """The heads of teachers that have ranks of their own and send their states; None if they do not."""
    settings = config.teacher
    if not settings.sends_states:
        return None
    dtype = _computing(config, policy.computing).weight_dtype
    heads = {
        name: TeacherHead.load(folder, policy, dtype, offload=settings.offload)
        for name, folder in config.teacher_folders.items()
    }
    return SentTeachers(heads, policy.computing.device, weight=settings.weight, forward=settings.forward)


def adapter_folder(config: Config) -> Path:
    return Path(config.teacher.adapter).expanduser()


def _load(config: Config, folder: Path, computing: ComputeSettings) -> Policy:
    """A teacher's weights; in fp8, those of its layers are narrow as soon as they are read."""
    if config.teacher.dtype != "fp8":
        return load_policy(folder, computing)
    checkpoint = open_checkpoint(folder)
    layout = BaseLayout(checkpoint.shape, computing.dtype, "fp8")
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=computing.device)
    read_base(checkpoint, layout, memory)
    return load_policy(folder, computing, base=Base(layout, memory))


def _computing(config: Config, policy: ComputeSettings) -> ComputeSettings:
    """How a teacher computes: as the policy does, in a precision of its own if that is set, choosing its own experts."""
    asked = config.teacher.dtype
    dtype: torch.dtype = policy.dtype if asked in ("auto", "fp8") else getattr(torch, asked)
    return replace(policy.of_another_model(), recompute="none", dtype=dtype)


def check_teachers(config: Config, spoken: Tokenizer) -> None:
    """Refuses teachers that cannot be read, or that judge other tokens than the policy's."""
    settings, vocab_size = config.teacher, read_shape(config.model_folder).vocab_size
    if settings.adapter:
        _check_adapter(config)
    if settings.url:
        _check_endpoint(EndpointTeacher(settings), spoken)
    for key, folder in _keys(config).items():
        try:
            shape, own = check_headers(folder), Tokenizer.load(folder)
        except ModelError as error:
            raise ModelError(f"{key}: {error}") from None
        check_same_tokens(key, "teacher", own, spoken)
        if shape.vocab_size != vocab_size and config.trainer.tensor > 1 and settings.kl == "exact":
            raise ConfigError(
                f"{key}: its head has {shape.vocab_size} rows, the policy's {vocab_size}; tensor-parallel ranks cut them at "
                "the same rows only if both are equal; set trainer.tensor=1, or teacher.kl=sampled"
            )
        if settings.alone:
            check_ranks("teacher", settings, shape, config)
        else:
            check_shared(shape, config.trainer.tensor, config.trainer.expert, "trainer")
        if settings.dtype == "fp8" and (settings.ranks if settings.alone else config.trainer.ranks) > 1:
            raise ConfigError(
                "teacher.dtype: an fp8 teacher is whole on one rank; set bfloat16, or place=own with one rank"
            )


def _keys(config: Config) -> Mapping[str, Path]:
    """The folder of each teacher, by its setting."""
    by_name = bool(config.teacher.by_name)
    return {
        f"teacher.by_name.{name}" if by_name else "teacher.path": folder
        for name, folder in config.teacher_folders.items()
    }


def _check_adapter(config: Config) -> None:
    try:
        check_same(config.model.lora, open_adapter(adapter_folder(config), read_shape(config.model_folder)))
        check_base_of(adapter_folder(config), config.model_folder)
    except InputError as error:
        raise ConfigError(f"teacher.adapter: {error}") from None


_PROBED = 32  # ids whose texts are compared


def _check_endpoint(teacher: EndpointTeacher, spoken: Tokenizer) -> None:
    """Asks once. An endpoint shows no hash of its tokenizer, so the texts of some ids are compared."""
    tokens = [number * max(1, spoken.vocab_size // _PROBED) % spoken.vocab_size for number in range(_PROBED)]
    try:
        scored = teacher.scored(tokens)
    except EndpointFailed as error:
        raise ConfigError(f"teacher.url: {error}") from None
    for token, one in zip(tokens[1:], scored, strict=True):
        theirs, ours = one.get("decoded_token"), spoken.decode([token], skip_special_tokens=False)
        if theirs and ours and str(theirs).strip() != ours.strip():
            told = f"token {token} is {str(theirs)[:40]!r} there and {ours!r} here"
            raise ConfigError(f"teacher.url: its tokenizer is another than the policy's: {told}")
