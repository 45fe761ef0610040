"""Builds teachers, on the trainer's ranks or on ranks of their own, and checks them before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from llamarl.builders.compute import check_ranks, compute_settings
from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, gpu_for
from llamarl.config import Config
from llamarl.config.lora import NO_LORA
from llamarl.config.teacher import THE_TEACHER
from llamarl.errors import ConfigError, InputError, ModelError
from llamarl.executors.executor import Executor
from llamarl.executors.teacher import Teacher
from llamarl.model.adapter_folder import check_base_of, check_same, open_adapter
from llamarl.model.checkpoint import check_headers
from llamarl.model.hf_config import read_shape
from llamarl.model.tokenizer import Tokenizer
from llamarl.train.endpoint_teacher import EndpointFailed, EndpointTeacher
from llamarl.train.mesh import check_tensor_parallel, make_mesh
from llamarl.train.policy import ComputeSettings, Policy, load_policy
from llamarl.train.teacher import AdapterTeacher, FrozenPolicy, HostedTeacher, Teachers


def build_teacher(context: BuildContext) -> Executor:
    """One rank of a teacher that has ranks of its own."""
    config, settings = context.config, context.config.teacher
    if settings.url:
        return Teacher(EndpointTeacher(settings))
    device = device_of("teacher.device", settings.device, gpu_for(context))
    mesh = make_mesh(settings.data, settings.tensor, context.rank, device)
    computing = _computing(config, compute_settings(config, device, mesh))
    policy = load_policy(config.teacher_folders[THE_TEACHER], computing)
    return Teacher(Teachers({THE_TEACHER: HostedTeacher(policy, offload=False)}))


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
        teachers[name] = HostedTeacher(load_policy(folder, computing), offload=settings.offload)
    return Teachers(teachers, weight=settings.weight, forward=settings.forward)


def adapter_folder(config: Config) -> Path:
    return Path(config.teacher.adapter).expanduser()


def _computing(config: Config, policy: ComputeSettings) -> ComputeSettings:
    """How a teacher computes: as the policy does, in a precision of its own if that is set."""
    asked = config.teacher.dtype
    dtype: torch.dtype = policy.dtype if asked == "auto" else getattr(torch, asked)
    return replace(policy, lora=NO_LORA, recompute="none", dtype=dtype)


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
        if own.vocabulary_hash != spoken.vocabulary_hash:
            raise ConfigError(
                f"{key}: its tokenizer is another than the policy's (hashes {own.vocabulary_hash} and "
                f"{spoken.vocabulary_hash}); a teacher must know the same tokens by the same ids"
            )
        if shape.vocab_size != vocab_size:
            raise ConfigError(
                f"{key}: its head has {shape.vocab_size} rows, the policy's {vocab_size}; the KL over the vocabulary needs "
                "the same"
            )
        check_tensor_parallel(shape, config.trainer.tensor, "trainer.tensor")
        if settings.alone:
            check_ranks("teacher", settings, shape, config)


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
