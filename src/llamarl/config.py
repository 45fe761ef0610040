"""Every setting of a job, with its default, limits and meaning: said once, here. Read, never written.

`llamarl config` prints this file as a table. What follows from other values is a property, not a setting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from llamarl.errors import ConfigError
from llamarl.types import Sampling


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of the YAML file."""


Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")]
Threads = Annotated[int, Meta(ge=0, description="CPU threads of each process; 0: one for each core")]


class Model(Section, frozen=True):
    path: Annotated[
        str, Meta(description="folder with config.json, *.safetensors and tokenizer.json; 'tiny' is the shipped model")
    ] = "tiny"


class Task(Section, frozen=True):
    kind: Annotated[Literal["arithmetic"], Meta(description="where prompts come from")] = "arithmetic"
    max_operand: Annotated[int, Meta(ge=9, le=999, description="arithmetic: operands run from 0 to this")] = 99
    held_out: Annotated[
        float, Meta(gt=0, lt=1, description="share of the problems kept for evaluation, chosen by hash")
    ] = 0.1


class Reward(Section, frozen=True):
    scorer: Annotated[
        str, Meta(description="exact, numeric, or FILE.py:FUNCTION called as score(completion, answer, prompt)")
    ] = "exact"


class Generator(Section, frozen=True):
    replicas: Annotated[int, Meta(ge=1, description="copies of the policy that generate side by side")] = 1
    slots: Annotated[int, Meta(ge=1, description="completions decoded at once by one replica")] = 768
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="a longer prompt is dropped, with the reason")] = 32
    max_new_tokens: Annotated[int, Meta(ge=1, description="longest completion, in tokens")] = 8
    temperature: Annotated[
        float, Meta(ge=0.01, le=10, description="of the sampling; also divides the trainer's logits")
    ] = 1.0
    device: Device = "auto"
    threads: Threads = 0


class Trainer(Section, frozen=True):
    lr: Annotated[float, Meta(gt=0, le=1, description="AdamW's learning rate")] = 8e-5
    warmup_updates: Annotated[int, Meta(ge=0, description="updates over which lr rises linearly from 0")] = 10
    final_lr_share: Annotated[
        float, Meta(ge=0, le=1, description="after the warm-up lr falls linearly to this share of itself")
    ] = 0.1
    betas: Annotated[tuple[float, float], Meta(description="AdamW's averaging factors, each in [0, 1)")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's, on matrices only")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="gradients are scaled down to this norm")] = 1.0
    device: Device = "auto"
    threads: Threads = 0


class Algo(Section, frozen=True):
    loss: Annotated[str, Meta(description="aipo, or FILE.py:FUNCTION called as loss(tokens, algo)")] = "aipo"
    rho: Annotated[float, Meta(gt=0, description="AIPO's upper clip of the importance weight; 2 to 10 works well")] = (
        4.0
    )
    zero_variance: Annotated[
        Literal["keep", "skip"],
        Meta(description="groups whose rewards are all equal: keep their tokens in the loss's denominator, or skip"),
    ] = "skip"


class Schedule(Section, frozen=True):
    updates: Annotated[int, Meta(ge=1, description="optimizer steps; each makes the next version of the policy")] = 180
    groups_per_update: Annotated[int, Meta(ge=1, description="P: prompts per update")] = 96
    samples_per_group: Annotated[int, Meta(ge=2, description="n: completions per prompt")] = 8
    max_staleness: Annotated[
        int,
        Meta(ge=0, description="S: versions a trained group may lag behind (window=1); 0 is synchronous and on-policy"),
    ] = 1
    window: Annotated[
        int, Meta(ge=1, description="W: at most W-1 younger groups may be trained before the oldest; 1 keeps order")
    ] = 1
    max_restarts: Annotated[
        int, Meta(ge=0, description="restarts of one executor in a row, without any work done, before the job stops")
    ] = 3
    max_attempts: Annotated[
        int, Meta(ge=1, description="a group whose executor died this often while holding it is dropped")
    ] = 3
    max_skipped: Annotated[
        int, Meta(ge=1, description="updates in a row whose loss or gradient is no number, before the job stops")
    ] = 5

    @property
    def num_groups(self) -> int:
        return self.updates * self.groups_per_update

    @property
    def num_places(self) -> int:
        """Groups that may be admitted and not yet retired."""
        return (self.max_staleness + 1) * self.groups_per_update

    @property
    def staleness_bound(self) -> int:
        """No token is ever trained on by a version further from the one that sampled its group's first token."""
        return (self.num_places + self.window - 2) // self.groups_per_update


class Snapshots(Section, frozen=True):
    every: Annotated[int, Meta(ge=0, description="updates between snapshots; 0: only one at the end")] = 25
    keep: Annotated[int, Meta(ge=1, description="newest snapshots that are kept")] = 2


class Evaluate(Section, frozen=True):
    prompts: Annotated[int, Meta(ge=0, description="held-out problems answered greedily; 0 switches it off")] = 512
    every: Annotated[int, Meta(ge=0, description="also evaluate every so many updates; 0: only before and after")] = 0


class Engine(Section, frozen=True):
    kind: Annotated[
        Literal["local", "inline"],
        Meta(description="where executors live: each in a process of its own, or all in this one, in turn"),
    ] = "local"
    start_s: Annotated[float, Meta(gt=0, description="local: an executor must be up within this time")] = 300.0
    silence_s: Annotated[
        float, Meta(gt=0, description="local: an executor with work to do that says nothing for so long is killed")
    ] = 600.0
    frame_s: Annotated[float, Meta(gt=0, description="local: a message must arrive whole within this time")] = 30.0


class Weights(Section, frozen=True):
    lease_s: Annotated[
        float, Meta(gt=0, description="a reader that holds a weight slot longer than this is declared dead")
    ] = 30.0


class Observe(Section, frozen=True):
    tensorboard: Annotated[bool, Meta(description="also write metrics for TensorBoard into the run folder")] = False


class Config(Section, frozen=True):
    seed: Annotated[int, Meta(ge=0, le=2**62, description="of prompts, sampling and everything else")] = 0
    placement: Annotated[
        Literal["split", "colocated"],
        Meta(description="executors run side by side, or share all devices and take turns (needs max_staleness=0)"),
    ] = "split"
    model: Model = Model()
    task: Task = Task()
    reward: Reward = Reward()
    generator: Generator = Generator()
    trainer: Trainer = Trainer()
    algo: Algo = Algo()
    schedule: Schedule = Schedule()
    snapshots: Snapshots = Snapshots()
    evaluate: Evaluate = Evaluate()
    engine: Engine = Engine()
    weights: Weights = Weights()
    observe: Observe = Observe()

    def __post_init__(self) -> None:
        schedule, generator = self.schedule, self.generator
        if generator.slots < schedule.samples_per_group:
            raise ConfigError(
                f"generator.slots: {generator.slots} slots cannot hold one group of "
                f"schedule.samples_per_group={schedule.samples_per_group}"
            )
        if schedule.window > schedule.num_places:
            raise ConfigError(
                f"schedule.window: {schedule.window} cannot take effect, since at most (max_staleness + 1) * "
                f"groups_per_update = {schedule.num_places} groups are under way"
            )
        if not all(0 <= beta < 1 for beta in self.trainer.betas):
            raise ConfigError(f"trainer.betas: each must lie in [0, 1), got {list(self.trainer.betas)}")
        if self.placement == "colocated" and schedule.max_staleness:
            raise ConfigError(
                f"placement: colocated executors take turns, so schedule.max_staleness={schedule.max_staleness} "
                "cannot take effect; set it to 0"
            )
        if self.placement == "colocated" and self.generator.device != self.trainer.device:
            raise ConfigError(
                f"placement: colocated executors share their devices, but generator.device={self.generator.device} "
                f"and trainer.device={self.trainer.device}"
            )
        if self.evaluate.every and not self.evaluate.prompts:
            raise ConfigError("evaluate.every: cannot take effect with evaluate.prompts=0")

    @property
    def training_sampling(self) -> Sampling:
        return Sampling(
            samples=self.schedule.samples_per_group,
            max_new_tokens=self.generator.max_new_tokens,
            temperature=self.generator.temperature,
        )

    @property
    def greedy_sampling(self) -> Sampling:
        return Sampling(samples=1, max_new_tokens=self.generator.max_new_tokens, temperature=0.0)

    @property
    def model_folder(self) -> Path:
        if self.model.path == "tiny":
            return Path(__file__).parent / "assets" / "tiny"
        return Path(self.model.path).expanduser()
