"""From a config to each executor's insides. Called in the process where the executor will live."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llamarl.algo.losses import LOSSES, Loss
from llamarl.algo.own_loss import guarded, try_loss
from llamarl.config import Config, ReferenceConfig, TrainerConfig
from llamarl.controller.line import index_of, role_of
from llamarl.errors import ConfigError, ModelError
from llamarl.executors.executor import Executor
from llamarl.executors.generator import Generator
from llamarl.executors.reference import Reference
from llamarl.executors.reward import Reward
from llamarl.executors.reward_model import RewardModel
from llamarl.executors.trainer import Trainer
from llamarl.families.parameters import parameters
from llamarl.generate.conversation import make_conversations
from llamarl.generate.decoder import ContinuousDecoder, Limits, Precision
from llamarl.generate.parallel import TensorRank, split_over_ranks
from llamarl.layout.model import SCALE
from llamarl.messages import ReaderStuck, Report
from llamarl.model.checkpoint import check_headers, load_model
from llamarl.model.classifier import load_classifier, open_classifier
from llamarl.model.hf_config import read_shape
from llamarl.model.shards import Parameters, Shard
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.training_state import POLICY, keeps_policy_only
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec
from llamarl.plugins import check_call, is_reference, load_function
from llamarl.tasks.failures import to_stderr
from llamarl.tasks.judge import Judge
from llamarl.tasks.registry import own_scorers
from llamarl.train.learner import Learner
from llamarl.train.mesh import TrainerMesh, check_tensor_parallel, make_mesh
from llamarl.train.policy import Computing, Policy, load_policy
from llamarl.train.reference import HostedReference
from llamarl.train.shards import owned_shards
from llamarl.train.state import load_masters, restore
from llamarl.weights.group import interface_for
from llamarl.weights.group_transport import GroupWriter
from llamarl.weights.memory import HOST
from llamarl.weights.rendezvous import Rendezvous, RendezvousReader
from llamarl.weights.select_transport import Place, Transport, select_transport, settle_transport
from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter, alone
from llamarl.weights.transport import WeightReader, WeightWriter
from llamarl.weights.wire import WireFormat


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
    gpu: int | None = None  # of its host, where the engine has chosen one and the setting says auto
    log: Callable[[str], None] = to_stderr  # for what is too long for a report, such as tracebacks
    given: Mapping[str, Callable[..., Any]] = field(
        default_factory=dict
    )  # scorers, where they live in this very process
    meets: Rendezvous | None = None  # how weights cross hosts; None: they stay on this one, in slots


Builder = Callable[[Site], Executor]


def build_generator(site: Site) -> Executor:
    config, settings = site.config, site.config.generator
    part = TensorRank(site.rank, site.num_ranks)
    number = index_of(site.executor) * site.num_ranks + site.rank
    device = device_of("generator.device", settings.device, gpu_for(site, "generator", number))
    model = load_model(config.model_folder, dtype=dtype_of(settings.dtype, device), device=device, box_of=part.box)
    split_over_ranks(model, part)
    tokenizer = Tokenizer.load(config.model_folder)
    decoder = ContinuousDecoder(
        model,
        Limits.of(config),
        eos_ids=tokenizer.eos_ids,
        seed=config.seed,
        recompute=settings.kv_on_new_weights == "recompute",
        tensor_ranks=part.count,
        precision=Precision.of(settings, keep_wide=wire_precision(config) != "fp8"),
        max_turns=config.conversation.max_turns if config.conversation.tool else 1,
    )
    return Generator(
        decoder,
        weight_reader(site, held_shards(model, part), device),
        make_conversations(config, decoder, tokenizer, part) if config.conversation.tool else None,
        max_failure_share=config.conversation.max_failure_share,
        deterministic=config.schedule.deterministic,
        log=site.log,
    )


def held_shards(model: Transformer, part: TensorRank) -> dict[str, Shard]:
    """Where a generator rank's weights arrive: its shards of all parameters and, where these are narrow, of their scales."""
    specs = parameters(model.shape)
    held = {name: Shard(tensor, part.box(specs[name])) for name, tensor in model.named_parameters()}
    for name, scale in model.named_buffers():
        rows, (first_column, _) = held[name.removesuffix(SCALE)].box
        segment = part.rank if first_column else 0  # one for each rank, where ranks share rows
        held[name] = Shard(scale, (rows, (segment, segment + 1)))
    return held


def weight_reader(site: Site, held: Parameters, device: torch.device) -> WeightReader:
    if site.meets is None:
        return SlotReader(site.slots[site.weights_source[role_of(site.executor)]], held)
    return RendezvousReader(
        site.meets,
        held,
        device,
        num_readers=site.num_ranks,
        limit_s=site.config.weights.lease_s,
        all_true=true_for_all if site.num_ranks > 1 else lambda mine: mine,
    )


def build_reward(site: Site) -> Executor:
    config = site.config
    judge = Judge.of(config, own_scorers(config.task), given=site.given)
    judge.prepare()
    return Reward(
        Tokenizer.load(config.model_folder),
        judge,
        judged=config.conversation.judge,
        max_failure_share=config.reward.max_failure_share,
        deterministic=config.schedule.deterministic,
        log=site.log,
    )


def build_reward_model(site: Site) -> Executor:
    config, settings = site.config, site.config.reward_model
    device = device_of("reward_model.device", settings.device, gpu_for(site, "reward_model", 0))
    folder = reward_model_folder(config)
    return RewardModel(
        load_classifier(folder, dtype=dtype_of(settings.dtype, device), device=device),
        Tokenizer.load(folder),
        Tokenizer.load(config.model_folder),
        settings,
        judged=config.conversation.judge,
    )


def reward_model_folder(config: Config) -> Path:
    return Path(config.reward_model.path).expanduser()


def check_reward_model(config: Config) -> None:
    """Told before anything starts: its files and its device."""
    try:
        open_classifier(reward_model_folder(config))
        Tokenizer.load(reward_model_folder(config))
    except ModelError as error:
        raise ModelError(f"reward_model.path: {error}") from None
    device_of("reward_model.device", config.reward_model.device)


def build_trainer(site: Site) -> Executor:
    config = site.config
    folder = site.snapshot / POLICY if site.snapshot else config.model_folder
    device = device_of("trainer.device", config.trainer.device, gpu_for(site, "trainer", site.rank))
    mesh = make_mesh(config.trainer.data, config.trainer.tensor, site.rank, device)
    computing = computing_of(config, device, mesh)
    policy = load_policy(folder, computing)
    learner = Learner(
        policy, make_loss(config), settings=config.trainer, algo=config.algo, updates=config.schedule.updates
    )
    load_masters(policy.model, learner.optimizer, folder)
    if site.snapshot and not keeps_policy_only(site.snapshot):
        restore(learner.optimizer, site.snapshot, mesh)
    hosted = config.algo.reference_kl > 0 and not config.reference_alone
    reference = HostedReference(load_policy(config.reference_folder, computing)) if hosted else None
    # Several ranks would need a process group of their own for it; on a CPU a thread would only take the passes' cores.
    beside = config.engine.kind != "inline" and device.type == "cuda" and site.num_ranks == 1
    return Trainer(
        learner,
        weight_writer(site, policy),
        carry_from=config.model_folder,
        reference=reference,
        tell=site.tell_engine if beside else None,
        policy_only_at=config.schedule.updates if config.snapshots.at_end == "policy" else None,
    )


def weight_writer(site: Site, policy: Policy) -> WeightWriter:
    """This rank's part of every publication: in device memory where all readers reach it, else in host memory; or in
    memory of its own, from which readers on other hosts pull."""
    shards = owned_shards(policy.model)
    wire = WireFormat.for_generator(wire_precision(site.config), policy.model.shape, site.config.generator.tensor)
    agree, lease_s = largest_of_all if site.num_ranks > 1 else alone, site.config.weights.lease_s
    if site.meets is not None:
        writer = GroupWriter(shards, lease_s=lease_s, wire=wire, agree=agree)
        site.meets.serve(writer)
        return writer
    transport, device = weight_transport(site.config), policy.computing.device
    return SlotWriter(
        site.slots["trainer"],
        shards,
        wire=wire,
        lease_s=lease_s,
        on_stuck=lambda pid: site.tell_engine(ReaderStuck(pid)),
        rank=site.rank,
        num_ranks=site.num_ranks,
        agree=agree,
        device=(device.index or 0) if transport == "cuda" else HOST,
    )


def wire_precision(config: Config) -> str:
    """Weights travel as the generators hold them: half the bytes where those are narrower. What fp16 generators hold are the
    trainer's own bf16 numbers. int8, and fp8 where trainer ranks share a row that has one scale, are made on arrival."""
    device = device_of("generator.device", config.generator.device)
    dtype = dtype_of(config.generator.dtype, device)
    whole_rows = config.generator.tensor % config.trainer.tensor == 0
    if config.generator.quantize == "fp8" and dtype == torch.bfloat16 and whole_rows:
        return "fp8"
    return "fp32" if dtype == torch.float32 else "bf16"


def largest_of_all(flags: torch.Tensor) -> None:
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)


def true_for_all(mine: bool) -> bool:
    flags = torch.tensor([int(mine)])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags.item())


def weight_transport(
    config: Config, can_reach: Callable[[int, int], bool] = torch.cuda.can_device_access_peer
) -> Transport:
    """Where hosts are named, weights go through a process group; otherwise all executors live on this one. To ask whether
    GPUs reach each other, CUDA is started."""
    if config.engine.hosts:
        interface_for(config.engine.host_names, config.engine.trusted_network)
        return settle_transport(config.weights.transport, "group")
    trainer = [device_of("trainer.device", config.trainer.device, rank) for rank in range(config.trainer.ranks)]
    first = first_gpu(config, "generator")
    numbers = range(first, first + config.generator.replicas * config.generator.tensor)
    generator = [device_of("generator.device", config.generator.device, number) for number in numbers]
    writers, readers = ([Place("this host", str(device)) for device in side] for side in (trainer, generator))
    possible = select_transport(writers, readers, config.engine.trusted_network, can_reach)
    return settle_transport(config.weights.transport, possible)


def build_reference(site: Site) -> Executor:
    config = site.config
    device = device_of("reference.device", config.reference.device, gpu_for(site, "reference", site.rank))
    mesh = make_mesh(config.reference.data, config.reference.tensor, site.rank, device)
    return Reference(load_policy(config.reference_folder, computing_of(config, device, mesh)))


def computing_of(config: Config, device: torch.device, mesh: TrainerMesh) -> Computing:
    """`auto` means bf16 and compiled blocks on a GPU, fp32 and plain ones elsewhere."""
    settings, on_gpu = config.trainer, device.type == "cuda"
    return Computing(
        device,
        dtype_of(settings.dtype, device),
        mesh,
        recompute=settings.recompute,
        compiled=on_gpu if settings.compile == "auto" else settings.compile == "on",
        tokens_per_pack=settings.tokens_per_pack,
        temperature=config.generator.temperature,
    )


def dtype_of(setting: str, device: torch.device) -> torch.dtype:
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, setting)
    return dtype


def check_training(config: Config) -> None:
    """What a user can get wrong about the trainer's and the reference's ranks, told before anything starts."""
    shape = read_shape(config.model_folder)
    _check_ranks("trainer", config.trainer, shape)
    if config.algo.reference_kl > 0:
        try:
            reference = check_headers(config.reference_folder)
        except ModelError as error:
            raise ModelError(f"reference.model: {error}") from None
        if reference.vocab_size != shape.vocab_size:
            raise ConfigError(
                f"reference.model: has {reference.vocab_size} tokens, the policy {shape.vocab_size}; "
                "a reference must judge the same tokens"
            )
        _check_ranks("reference", config.reference, reference)


def _check_ranks(section: str, settings: TrainerConfig | ReferenceConfig, shape: ModelSpec) -> None:
    check_tensor_parallel(shape, settings.tensor, f"{section}.tensor")
    device = device_of(f"{section}.device", settings.device)
    if device.type == "cuda" and settings.ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{section}.data: {settings.data} * {settings.tensor} ranks need as many CUDA devices; "
            f"there are {torch.cuda.device_count()}"
        )


def gpu_for(site: Site, role: str, number: int) -> int:
    """Where the engine has put this rank, or, on one host, the next one of its role's."""
    return first_gpu(site.config, role) + number if site.gpu is None else site.gpu


def first_gpu(config: Config, role: str) -> int:
    """Side by side, roles have GPUs of their own as far as these go, the trainer's first; co-located, they share them."""
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
    """A loss of the user's comes guarded."""
    name = config.algo.loss
    if is_reference(name):
        function = load_function("algo.loss", name)
        check_call("algo.loss", name, function, ("tokens", "algo"))
        return guarded(function)
    if name not in LOSSES:
        raise ConfigError(f"algo.loss: unknown loss '{name}'; known: {', '.join(LOSSES)}, or FILE.py:FUNCTION")
    return LOSSES[name]


def check_loss(config: Config) -> None:
    """A loss of the user's is tried on a small batch: what it gets wrong shows before anything starts."""
    loss = make_loss(config)
    if is_reference(config.algo.loss):
        try_loss(loss, config.algo)


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


BUILDERS: dict[str, Builder] = {
    "generator": build_generator,
    "reward": build_reward,
    "reward_model": build_reward_model,
    "trainer": build_trainer,
    "reference": build_reference,
}
