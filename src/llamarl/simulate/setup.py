"""Makes a simulation from a job's config, a machine and the lengths of answers."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from llamarl.config import Config
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.default_line import default_line
from llamarl.controller.ledger import Record
from llamarl.controller.line import Line, executor_names
from llamarl.errors import InputError
from llamarl.families.parameters import head_size
from llamarl.machine import GIB
from llamarl.model.hf_config import find_shape, read_shape
from llamarl.model_spec import SHAPES, ModelSpec
from llamarl.observe.timeline import Timeline
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import Gpu
from llamarl.plan.lengths import Lengths
from llamarl.plan.shared_base import shared_base_bytes
from llamarl.plan.terms import WIDTH, WORKSPACE_BYTES, copy_s, num_trained, published_bytes, wire
from llamarl.plan.trainer import TrainerRanks
from llamarl.plan.transfer import transfer_s
from llamarl.simulate.answers import Answers
from llamarl.simulate.clock import Clock, Device
from llamarl.simulate.decoding import Decoding
from llamarl.simulate.simulation import Faults, Simulation
from llamarl.simulate.workers import GeneratorWorker, QueueWorker, WorkItem
from llamarl.types import GroupFacts

STATE_BYTES = 12  # bytes of a snapshot per parameter: master and two moments
POLICY_BYTES = 2  # bytes per parameter of a snapshot that keeps the policy alone
DISK_BYTES_PER_S = 1e9


class SimulationSetup(Struct, frozen=True, kw_only=True):
    """`gpus` is the number of devices; 0: one for each rank. `skipped` is the share of groups whose rewards are all equal."""

    config: Config
    shape: ModelSpec
    gpu: Gpu
    answers: Lengths
    prompt: int
    gpus: int = 0
    precision: str = ""  # precision of the generators; empty: as in the config
    skipped: float = 0.0
    faults: Faults = Faults()
    max_s: float = float("inf")

    @property
    def generator_precision(self) -> str:
        settings, named = self.config.generator, {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
        quantized = self.config.generator_quantize if self.config.generator_quantize != "none" else ""
        return self.precision or quantized or named.get(settings.dtype, "fp32" if self.gpu.is_cpu else "bf16")

    @property
    def replica(self) -> Replica:
        settings = self.config.generator
        return Replica(
            self.shape,
            self.gpu,
            self.generator_precision,
            settings.tensor,
            settings.slots,
            self.prompt,
            settings.max_prompt_tokens + settings.max_new_tokens,
            self.config.model.lora,
            settings.lora == "merged",
            settings.expert,
        )

    @property
    def trainer(self) -> TrainerRanks:
        settings, precision = self.config.trainer, "fp32" if self.gpu.is_cpu else "bf16"
        return TrainerRanks(
            self.shape,
            self.gpu,
            precision,
            settings.data,
            settings.tensor,
            settings.recompute,
            settings.tokens_per_pack,
            settings.replicate,
            self.config.model.lora,
            "fp8" if self.config.model.base == "fp8" else precision,
            settings.context,
            settings.offload and not self.config.model.lora and not self.gpu.is_cpu,
            settings.expert,
        )

    @property
    def generator_ranks(self) -> int:
        return self.config.generator.replicas * self.config.generator.tensor

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and generators are on the same devices."""
        return self.config.placement == "colocated" or 0 < self.gpus < self.trainer.ranks + self.generator_ranks

    @property
    def computes_beside(self) -> bool:
        """Whether they do so side by side; `auto` is taken to find MPS."""
        engine, split = self.config.engine, self.config.placement != "colocated"
        return self.takes_turns and split and engine.kind == "local" and engine.mps != "off"

    @property
    def memory_gib(self) -> dict[str, float]:
        """GiB that a GPU of each role needs, and one that both share."""
        replica, samples = self.replica, self.config.schedule.samples_per_group
        generator = replica.memory_bytes(replica.cached_tokens(samples, self.answers))
        found = {"trainer": self.trainer.memory_bytes + self._teacher_heads_bytes, "generator": generator}
        if self.takes_turns:
            found["both"] = sum(found.values()) - WORKSPACE_BYTES - shared_base_bytes(self.trainer, replica)
        return {role: num_bytes / GIB for role, num_bytes in found.items()}

    @property
    def _teacher_heads_bytes(self) -> float:
        """Heads of teachers that send their states, on each rank of the trainer."""
        if not self.config.teacher.sends_states:
            return 0.0
        num_weights = sum(head_size(read_shape(folder)) for folder in self.config.teacher_folders.values())
        return num_weights * WIDTH[self.trainer.precision] / self.config.trainer.tensor

    @property
    def published_bytes(self) -> float:
        """Bytes of a version: all weights, or the adapters."""
        return published_bytes(self.shape, wire(self.generator_precision, self.shape), self.config.model.lora)

    @property
    def load_s(self) -> float:
        """Seconds that a replica loses when it loads weights: a copy within a device, or a transfer over the network."""
        if self.takes_turns or self.gpu.is_cpu:
            return copy_s(self.gpu, self.published_bytes / self.config.generator.tensor)
        return transfer_s(self.trainer, self.replica, self.config.generator.replicas)


def make_simulation(scene: SimulationSetup, hear: Callable[[Record], None] = lambda record: None) -> Simulation:
    config, line, timeline = scene.config, default_line(scene.config), Timeline()
    if config.agent:
        raise InputError("agent: what agents do between their calls is not known, so such a job cannot be simulated")
    if config.sft or (config.teacher and not config.teacher.alone):
        raise InputError("simulating rows of data (sft.path) or teachers on the trainer's ranks is not possible yet")
    clock, answers = Clock(timeline), _answers(scene)
    _seat(scene, line, clock, answers)
    return Simulation(
        Controller(line, config.schedule, config.evaluate, config.snapshots),
        clock,
        timeline,
        answers,
        ranks=_ranks(line, scene.gpu),
        background=lambda command: _saved_bytes(scene, command) / DISK_BYTES_PER_S,
        faults=scene.faults,
        hear=hear,
        max_s=scene.max_s,
    )


def _saved_bytes(scene: SimulationSetup, command: ev.AnyCommand) -> float:
    """Bytes that one rank saves: its part of masters and moments, or, at the end, of what `snapshots.at_end` names."""
    config = scene.config
    last = isinstance(command, ev.Save) and command.version == config.schedule.updates
    policy_only = last and config.snapshots.at_end == "policy"
    trained = num_trained(scene.shape, config.model.lora)
    return (POLICY_BYTES if policy_only else STATE_BYTES) * trained / scene.trainer.ranks


def _answers(scene: SimulationSetup) -> Answers:
    schedule = scene.config.schedule
    limit = scene.config.generator.max_new_tokens
    if scene.answers.longest > limit:
        raise InputError(
            f"--answer {scene.answers.spec}: answers of {scene.answers.longest} tokens, but "
            f"generator.max_new_tokens={limit}; raise that to {scene.answers.longest}, or ask about shorter answers"
        )
    return Answers(
        scene.answers,
        samples=schedule.samples_per_group,
        prompt=scene.prompt,
        seed=scene.config.seed,
        flat=scene.skipped,
        skip_flat=scene.config.algo.zero_variance == "skip",
        share_prompts=scene.config.trainer.share_prompts != "off",
        windows=scene.shape.windows,
    )


def _ranks(line: Line, gpu: Gpu) -> dict[str, int]:
    """Number of GPUs whose failure ends an executor. A role without a GPU does not fail."""
    roles = [role for role in line.roles if role.gpu or gpu.is_cpu]
    return {name: role.ranks for role in roles for name in executor_names(role)}


def _seat(scene: SimulationSetup, line: Line, clock: Clock, answers: Answers) -> None:
    trainer_device, generator_device, reward_device = _devices(scene)
    config, gpu = scene.config, scene.gpu
    load_s = scene.load_s
    for role in line.roles:
        for name in executor_names(role):
            if role.name == "generator":
                worker = GeneratorWorker(name, Decoding(scene.replica), answers, gpu.engine, load_s)
                clock.seat(worker, generator_device, _threads(scene, config.generator.threads, "generator"))
            elif role.unit == "batch":
                plan = _plans(scene, answers)[role.name]
                threads = _threads(scene, config.trainer.threads, "trainer")
                clock.seat(QueueWorker(name, plan), trainer_device, threads)
            else:
                clock.seat(QueueWorker(name, _reward_plan(scene, answers)), reward_device)


def _devices(scene: SimulationSetup) -> tuple[Device, Device, Device]:
    """The devices of the trainer, the generators and the reward."""
    if scene.gpu.is_cpu:
        cores = Device(cores=scene.gpu.cores)
        return cores, cores, cores
    beside, share = scene.gpu.beside, scene.config.engine.mps_trainer_share
    trainer = Device(beside=beside if scene.computes_beside else None, trainer_share=share)
    return trainer, trainer if scene.takes_turns else Device(), Device()


def _threads(scene: SimulationSetup, setting: int, section: str) -> int:
    if not scene.gpu.is_cpu:
        return 1
    threads = setting or scene.gpu.cores
    if threads != scene.gpu.threads:
        raise InputError(
            f"{section}.threads: {threads} threads, but --gpu {scene.gpu.name} was measured with {scene.gpu.threads}; "
            f"calibrate with --threads {threads}"
        )
    return threads


Plan = Callable[[ev.ExecutorCommand], WorkItem]
_FORWARD = 1 / 3  # of an update: a forward pass alone


def _plans(scene: SimulationSetup, answers: Answers) -> dict[str, Plan]:
    """How long each role that works on batches takes, in updates of the trainer; a critic is taken to be as large as the
    policy."""
    config = scene.config
    critic = _FORWARD + (config.critic.epochs or config.algo.epochs)
    hosted = critic if config.has_critic and not config.critic_alone else 0.0
    update = _trainer_plan(scene, answers)
    return {
        "trainer": _taking(update, config.algo.epochs + hosted, "update"),
        "critic": _taking(update, critic, "critic"),
        "reference": _taking(update, _FORWARD, "reference"),
        "teacher": _taking(update, _FORWARD, "teacher"),
    }


def _taking(update: Plan, times: float, name: str) -> Plan:
    """The trainer's plan with batches that take so many times as long."""

    def plan(command: ev.ExecutorCommand) -> WorkItem:
        item = update(command)
        return item._replace(left_s=item.left_s * times, name=name) if isinstance(command, ev.RunBatch) else item

    return plan


def _trainer_plan(scene: SimulationSetup, answers: Answers) -> Callable[[ev.ExecutorCommand], WorkItem]:
    engine, trainer = scene.gpu.engine, scene.trainer
    publish_s = copy_s(scene.gpu, scene.published_bytes / trainer.ranks)
    save_s = copy_s(scene.gpu, STATE_BYTES * num_trained(scene.shape, scene.config.model.lora) / trainer.ranks)

    def plan(command: ev.ExecutorCommand) -> WorkItem:
        match command:
            case ev.RunBatch():
                batch = answers.batch(scene.gpu, command.ordinals)
                spent_s = trainer.update_s(batch) if batch.tokens else 0.0
                done = ev.BatchDone(command.executor, command.incarnation, command.update)
                return WorkItem(spent_s + engine.message_s + engine.update_s, "update", done)
            case ev.Publish():
                published = ev.Published(command.executor, command.incarnation, command.version)
                return WorkItem(publish_s + engine.message_s, "publish", published)
            case ev.Save():
                return WorkItem(save_s, "save")
            case _:
                raise AssertionError(f"a trainer is not told {command}")

    return plan


def _reward_plan(scene: SimulationSetup, answers: Answers) -> Callable[[ev.ExecutorCommand], WorkItem]:
    engine, samples = scene.gpu.engine, scene.config.schedule.samples_per_group

    def plan(command: ev.ExecutorCommand) -> WorkItem:
        if not isinstance(command, ev.RunGroup):
            raise AssertionError(f"a reward is not told {command}")
        facts = GroupFacts(same_rewards=command.kind == "train" and answers.is_flat(command.ordinal))
        done = ev.GroupDone(command.executor, command.incarnation, command.ordinal, facts)
        return WorkItem(samples * engine.score_s, "score", done)

    return plan


def shape_of_job(config: Config, name: str) -> ModelSpec:
    """The named shape, else that of the job's model folder, else the known shape that the folder is named after."""
    folder = config.model_folder
    if name:
        return find_shape(name)
    if (folder / "config.json").is_file():
        return read_shape(folder)
    if folder.name in SHAPES:
        return SHAPES[folder.name]
    raise InputError(f"model.path: no folder {config.model.path} here; name the model's shape with --model")
