"""Whether a job fits into the memory of its machine, checked before anything starts.

Memory that is surely taken (weights, optimizer state, a cache of fixed size) must fit into all the memory there is; otherwise
the job is refused. Memory that may be taken besides (the activations of the longest pass) should fit too, into what is free
now; otherwise a note says so. The formulas are the planner's (`plan/terms.py`). Processes that share a device, or the host,
count together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct

from llamarl.builders.base import why_two_bases
from llamarl.builders.devices import device_of, dtype_of, generator_devices, trainer_devices
from llamarl.builders.reward_model import reward_model_folder
from llamarl.builders.weights import weight_transport, wire_precision
from llamarl.config import Config, TrainerConfig
from llamarl.controller.default_line import default_line
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.errors import ConfigError
from llamarl.families.parameters import head_size, num_parameters
from llamarl.generate.limits import Limits
from llamarl.machine import GIB, FreeMemory, host_memory
from llamarl.model.adapter_folder import base_or_same
from llamarl.model.base import BaseLayout
from llamarl.model.classifier import read_value_shape
from llamarl.model.hf_config import read_classifier_shape, read_shape
from llamarl.model_spec import ModelSpec
from llamarl.plan.terms import (
    WIDTH,
    WORKSPACE_BYTES,
    held_bytes,
    kv_bytes_per_token,
    num_trained,
    offloaded_bytes,
    pass_bytes,
    published_bytes,
    training_state_bytes,
    weight_bytes,
)
from llamarl.weights.cuda_driver import CudaRefused, total_memory
from llamarl.weights.slot_file import NUM_SLOTS

HOST = "cpu"
PROCESSES = "the processes themselves"
_PROCESS_BYTES = 300 << 20  # of a process that has only imported torch
_MINOR_SHARE = 0.1  # of the whole; smaller items are not named
_NARROW = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
_LEAST = 14 / 16  # share of the training state that is sure on a GPU: gradients of a single pass stay bf16
_OFFLOADED = 10 / 14  # share of that in host memory: moments, and the low halves of the masters


class MemoryItem(Struct, frozen=True):
    """Memory that one rank takes."""

    what: str
    place: str  # `cpu`, or a GPU
    num_bytes: float
    advice: str  # settings that make it smaller
    sure: bool = True  # whether it is taken whatever the answers look like


def check_memory(config: Config) -> list[str]:
    """Refuse a job that cannot fit; returns notes about one that may not. The hosts of a cluster are not checked."""
    if config.engine.hosts:
        return []
    return settle(list(job_parts(config)))


def check_evaluation_memory(config: Config, device: str, sequences: int) -> list[str]:
    """As `check_memory`, for a model that only generates."""
    shape, place = read_shape(base_or_same(config.model_folder)), str(torch.device(device))
    limits = Limits.of(config, sequences=sequences)
    return settle(list(_generator_parts(config, shape, torch.device(place), limits)))


def settle(parts: Sequence[MemoryItem]) -> list[str]:
    """Compare items with the memory at each place: refuse what cannot fit, return notes about what may not."""
    notes = []
    for place in dict.fromkeys(part.place for part in parts):
        here, room = [part for part in parts if part.place == place], room_at(place)
        sure = sum(part.num_bytes for part in here if part.sure)
        whole = sum(part.num_bytes for part in here)
        name = "this machine" if place == HOST else place
        if sure > room.total_bytes:
            raise ConfigError(
                f"memory: {name} has {_gib(room.total_bytes)}, and this takes at least {_gib(sure)}: "
                f"{describe_largest([part for part in here if part.sure])}"
            )
        if whole > room.available_bytes:
            notes.append(
                f"{'memory is tight' if whole < 2 * room.total_bytes else 'MEMORY WILL VERY LIKELY NOT DO'}: {name} has "
                f"{_gib(room.available_bytes)} free, and this may take {_gib(whole)}: {describe_largest(here)}"
            )
    return notes


def room_at(place: str) -> FreeMemory:
    """Memory of the host, or of a GPU, without starting CUDA."""
    if place == HOST:
        return host_memory()
    try:
        total = float(total_memory(torch.device(place).index or 0))
    except CudaRefused:
        total = float("inf")
    return FreeMemory(total, total)


def job_parts(config: Config) -> Iterator[MemoryItem]:
    shape = read_shape(config.model_folder)
    if shares_base(config):
        yield from _shared_base(config, shape)
    for device in generator_devices(config, _first_gpus(config)):
        yield from _generator_parts(config, shape, device, Limits.of(config))
    trainers = trainer_devices(config, _first_gpus(config))
    for device in trainers:
        yield from _trainer_parts(config, shape, device)
    yield from _copies_of_policy(config, shape, trainers[: config.trainer.shard_ranks])
    if config.algo.reference_kl > 0:
        yield from _reference_parts(config)
    if config.teacher_folders:
        yield from _teacher_parts(config)
    if config.has_critic:
        yield from _critic_parts(config)
    if config.reward_model.path:
        yield _reward_model_part(config)


def _generator_parts(config: Config, shape: ModelSpec, device: torch.device, limits: Limits) -> Iterator[MemoryItem]:
    settings, place = config.generator, _place(device)
    wide = _NARROW[dtype_of(settings.dtype, device)]
    precision = wide if config.generator_quantize == "none" else config.generator_quantize
    # Without `kv_pages`, a GPU's cache takes what is left: only the smallest cache is sure.
    pages = limits.num_pages or (limits.least_pages if device.type == "cuda" else limits.enough_pages)
    each = kv_bytes_per_token(shape, wide, settings.tensor, settings.kv_cache)
    held = held_bytes(shape, precision, config.model.lora, merged=settings.lora == "merged") / settings.tensor
    yield MemoryItem(
        "weights of the generator",
        place,
        held - (weight_bytes(shape, precision) if shares_base(config) else 0.0),
        "set generator.dtype=bfloat16 or lower generator.replicas",
    )
    yield MemoryItem(
        "KV cache",
        place,
        pages * limits.page_tokens * each,
        "lower generator.slots, generator.max_new_tokens or generator.kv_pages",
    )
    yield _process(device)


def _trainer_parts(config: Config, shape: ModelSpec, device: torch.device) -> Iterator[MemoryItem]:
    settings, place, on_gpu = config.trainer, _place(device), device.type == "cuda"
    state = _training_state(config, shape, on_gpu)
    away = 0.0 if config.model.lora else _OFFLOADED * state if settings.offload and on_gpu else 0.0
    more = "set trainer.offload=true, or share it over GPUs with trainer.data" if on_gpu else "take a smaller model"
    what = "frozen weights and adapters" if config.model.lora else "optimizer state and gradients"
    if shares_base(config):
        what = "adapters and their optimizer state"
    yield MemoryItem(what, place, state - away, more)
    if away:
        yield MemoryItem("optimizer state in host memory", HOST, away, "take a smaller model")
    schedule, longest = config.schedule, config.generator.max_prompt_tokens + config.generator.max_new_tokens
    answers = schedule.groups_per_update * schedule.samples_per_group
    if config.supervised:
        longest = config.sft.max_tokens or longest
    tokens = max(longest, min(settings.tokens_per_pack, answers * longest / settings.batch_ranks))
    width = WIDTH["bf16" if on_gpu else "fp32"]
    lora = config.model.lora
    ranks = settings.replicate * settings.fsdp_ranks
    passing = sum(
        pass_bytes(
            shape,
            tokens,
            settings.recompute,
            settings.tensor,
            ranks,
            width,
            lora,
            context=settings.context,
            data=settings.fsdp_ranks,
            expert=settings.expert,
        ).values()
    )
    yield MemoryItem("activations", place, passing, _less_activations(longest, settings), sure=False)
    if settings.recompute == "offload" and on_gpu:
        host = offloaded_bytes(shape, tokens / settings.context, settings.tensor, width)
        yield MemoryItem("activations in host memory", HOST, host, "lower trainer.tokens_per_pack", sure=False)
    yield _process(device)


def _less_activations(longest: int, settings: TrainerConfig) -> str:
    """Settings that make passes smaller. A pack is never smaller than the longest sequence, which ranks can share."""
    if longest >= settings.tokens_per_pack and settings.recompute in ("full", "offload"):
        return "share sequences over GPUs with trainer.context"
    return "lower trainer.tokens_per_pack or set trainer.recompute=full"


def _training_state(config: Config, shape: ModelSpec, on_gpu: bool) -> float:
    """Bytes per rank that are surely taken. Frozen weights have the type of the passes."""
    settings, lora = config.trainer, config.model.lora
    base = "fp8" if config.model.base == "fp8" else "bf16" if on_gpu else "fp32"
    state = training_state_bytes(
        shape, settings.tensor, settings.fsdp_ranks, settings.replicate, lora, base, settings.expert
    )
    if not lora:
        return state * (_LEAST if on_gpu else 1.0)
    return state - (weight_bytes(shape, base) if shares_base(config) else 0.0)


def shares_base(config: Config) -> bool:
    """Whether trainer and generators hold one frozen base together."""
    return bool(config.model.lora) and not why_two_bases(config, _first_gpus(config))


def _shared_base(config: Config, shape: ModelSpec) -> Iterator[MemoryItem]:
    """The base, once on each device on which somebody computes with it."""
    gpus = _first_gpus(config)
    devices = [*trainer_devices(config, gpus), *generator_devices(config, gpus)]
    dtype = dtype_of(config.trainer.dtype, devices[0])
    precision = "fp8" if config.model.base == "fp8" else _NARROW[dtype]
    for place in dict.fromkeys(map(_place, devices)):
        yield MemoryItem("the frozen base", place, weight_bytes(shape, precision), "set model.base=fp8")


def _copies_of_policy(config: Config, shape: ModelSpec, devices: Sequence[torch.device]) -> Iterator[MemoryItem]:
    """What the ranks of the first replica hold besides: weights for the generators, and the state that is being saved."""
    ranks = len(devices)
    on_device = weight_transport(config, _first_gpus(config), can_reach=lambda reader, writer: True) == "cuda"
    published = NUM_SLOTS * published_bytes(shape, wire_precision(config), config.model.lora) / ranks
    copied = 12 * num_trained(shape, config.model.lora) / ranks
    for place in map(_place, devices):
        if config.samples:
            yield MemoryItem(
                "published weights",
                place if on_device else HOST,
                published,
                "set weights.transport=memfd" if on_device else "set generator.dtype=bfloat16",
            )
        if _saves_whole(config):
            yield MemoryItem("copy for snapshots", HOST, copied, "set snapshots.every=0 and snapshots.at_end=policy")


def _saves_whole(config: Config) -> bool:
    snapshots = config.snapshots
    return snapshots.at_end == "whole" or 0 < snapshots.every <= config.schedule.updates


def _reference_parts(config: Config) -> Iterator[MemoryItem]:
    """Weights of the reference: on ranks of its own, or in host memory until the trainer's ranks use them."""
    shape, settings, advice = read_shape(config.reference_folder), config.reference, "take a smaller reference.model"
    if config.base_is_reference:
        return
    if not config.reference_alone:
        device = device_of("trainer.device", config.trainer.device)
        held = config.trainer.replicate * num_parameters(shape) * _width(config, device)
        yield MemoryItem("weights of the reference", HOST, held, advice)
        return
    for rank in range(settings.ranks):
        device = device_of("reference.device", settings.device, _first_gpus(config)["reference"] + rank)
        each = num_parameters(shape) * _width(config, device) / settings.ranks
        if config.model.lora and settings.ranks == 1 and config.reference_folder == config.model_folder:
            each = 0.0  # the base is there already, or is counted with the trainer
        yield MemoryItem("weights of the reference", _place(device), each, advice)
        yield _process(device)


def _teacher_parts(config: Config) -> Iterator[MemoryItem]:
    """Weights of the teachers: on ranks of their own, on the trainer's, or in host memory until these use them."""
    settings, advice = config.teacher, "take a smaller teacher, or set teacher.dtype=bfloat16 or fp8"
    first, ranks = ("teacher", settings.ranks) if settings.alone else ("trainer", config.trainer.ranks)
    asked = settings.device if settings.alone else config.trainer.device
    for rank in range(ranks):
        device = device_of(f"{first}.device", asked, _first_gpus(config)[first] + rank)
        held = (
            sum(_teacher_bytes(config, read_shape(folder), device) for folder in config.teacher_folders.values())
            / ranks
        )
        away = settings.offload and not settings.alone
        yield MemoryItem("weights of the teachers", HOST if away else _place(device), held, advice)
        if settings.alone:
            yield _process(device)
    if settings.sends_states:
        yield from _teacher_heads(config)


def _teacher_heads(config: Config) -> Iterator[MemoryItem]:
    """Heads of teachers that send their states: on each rank of the trainer, its rows of them, while they are used."""
    num_weights = sum(head_size(read_shape(folder)) for folder in config.teacher_folders.values())
    asked = config.teacher.dtype
    for device in trainer_devices(config, _first_gpus(config)):
        width = dtype_of(config.trainer.dtype if asked in ("auto", "fp8") else asked, device).itemsize
        held = num_weights * width / config.trainer.tensor
        yield MemoryItem("heads of the teachers", _place(device), held, "share their rows with trainer.tensor")
        if config.teacher.offload and device.type == "cuda":
            yield MemoryItem("heads of the teachers in host memory", HOST, held, "set teacher.offload=false")


def _teacher_bytes(config: Config, shape: ModelSpec, device: torch.device) -> float:
    asked = config.teacher.dtype
    if asked == "fp8":
        return float(BaseLayout(shape, dtype_of(config.trainer.dtype, device), "fp8").num_bytes)
    return float(
        num_parameters(shape) * (_width(config, device) if asked == "auto" else dtype_of(asked, device).itemsize)
    )


def _critic_parts(config: Config) -> Iterator[MemoryItem]:
    """Weights, gradients and optimizer state of the critic, on the trainer's ranks or on its own, and its copy for
    snapshots."""
    shape, settings = read_value_shape(config.critic_folder), config.critic_trainer
    role = "critic" if config.critic_alone else "trainer"
    advice = "take a smaller critic.path, or more ranks (critic.place=own with critic.data)"
    each = training_state_bytes(shape, settings.tensor, settings.fsdp_ranks, settings.replicate)
    for rank in range(settings.ranks):
        device = device_of(f"{role}.device", settings.device, _first_gpus(config)[role] + rank)
        on_gpu = device.type == "cuda"
        state = each * (_LEAST if on_gpu else 1.0)
        away = _OFFLOADED * state if settings.offload and on_gpu else 0.0
        yield MemoryItem("state of the critic", _place(device), state - away, advice)
        if away:
            yield MemoryItem("state of the critic in host memory", HOST, away, advice)
        if _saves_whole(config) and rank < settings.shard_ranks:
            copied = 12 * num_parameters(shape) / settings.shard_ranks
            yield MemoryItem("copy of the critic for snapshots", HOST, copied, "set snapshots.every=0")
        if config.critic_alone:
            yield _process(device)


def _first_gpus(config: Config) -> dict[str, int]:
    return first_gpus(default_line(config), config.placement)


def _width(config: Config, device: torch.device) -> int:
    return dtype_of(config.trainer.dtype, device).itemsize


def _reward_model_part(config: Config) -> MemoryItem:
    device = device_of("reward_model.device", config.reward_model.device, _first_gpus(config)["reward_model"])
    shape = read_classifier_shape(reward_model_folder(config))
    each = num_parameters(shape) * dtype_of(config.reward_model.dtype, device).itemsize
    return MemoryItem("weights of the reward model", _place(device), each, "take a smaller reward_model.path")


def _process(device: torch.device) -> MemoryItem:
    taken = WORKSPACE_BYTES if device.type == "cuda" else _PROCESS_BYTES
    return MemoryItem(PROCESSES, _place(device), taken, "lower generator.replicas", sure=False)


def _place(device: torch.device) -> str:
    return f"cuda:{device.index or 0}" if device.type == "cuda" else HOST


def describe_largest(parts: Sequence[MemoryItem]) -> str:
    """The largest items, each named once, and the settings that make the first ones smaller."""
    sizes: dict[str, float] = {}
    for part in parts:
        sizes[part.what] = sizes.get(part.what, 0.0) + part.num_bytes
    largest = sorted(sizes, key=lambda what: -sizes[what])[:3]
    named = [what for what in largest if sizes[what] > _MINOR_SHARE * sum(sizes.values())]
    advice = dict.fromkeys(next(part.advice for part in parts if part.what == what) for what in named[:2])
    return f"{', '.join(f'{what} {_gib(sizes[what])}' for what in named)}; {'; '.join(advice)}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
