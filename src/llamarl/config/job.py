"""All settings of a job, and the rules between sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from llamarl.config.agent import AgentConfig
from llamarl.config.algo import AlgoConfig
from llamarl.config.conversation import ConversationConfig
from llamarl.config.critic import CriticConfig
from llamarl.config.engine import EngineConfig
from llamarl.config.evaluate import EvaluateConfig
from llamarl.config.generator import GeneratorConfig
from llamarl.config.hub_names import pinned_folder
from llamarl.config.llm_judge import LLMJudgeConfig
from llamarl.config.model import ModelConfig
from llamarl.config.observe import ObserveConfig
from llamarl.config.reference import ReferenceConfig
from llamarl.config.reward import RewardConfig
from llamarl.config.reward_model import RewardModelConfig
from llamarl.config.sandbox import SandboxConfig
from llamarl.config.schedule import ScheduleConfig
from llamarl.config.section import OwnRanks, Section
from llamarl.config.sft import SftConfig
from llamarl.config.snapshots import SnapshotsConfig
from llamarl.config.task import TaskConfig
from llamarl.config.teacher import THE_TEACHER, TeacherConfig
from llamarl.config.trainer import TrainerConfig
from llamarl.config.weights import WeightsConfig
from llamarl.errors import ConfigError
from llamarl.types import Sampling

SHIPPED_MODELS = ("tiny", "tiny-moe")
# Scorers that return 1 or 0. The mean of any other (format, length, judge, user code) is not an accuracy.
RIGHT_OR_WRONG = frozenset(["auto", "exact", "numeric", "choice", "regex", "math", "code"])


class Config(Section, frozen=True):
    """All settings of a job: one field per section of the YAML file."""

    seed: Annotated[int, Meta(ge=0, le=2**62, description="seed of the prompts, the sampling and everything else")] = 0
    placement: Annotated[
        Literal["split", "colocated"],
        Meta(description="executors run in parallel, or share all devices and take turns (needs max_staleness=0)"),
    ] = "split"
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    reward: RewardConfig = RewardConfig()
    sandbox: SandboxConfig = SandboxConfig()
    llm_judge: LLMJudgeConfig = LLMJudgeConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    conversation: ConversationConfig = ConversationConfig()
    agent: AgentConfig = AgentConfig()
    generator: GeneratorConfig = GeneratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    algo: AlgoConfig = AlgoConfig()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    sft: SftConfig = SftConfig()
    teacher: TeacherConfig = TeacherConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    snapshots: SnapshotsConfig = SnapshotsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    observe: ObserveConfig = ObserveConfig()

    def __post_init__(self) -> None:
        _check_schedule(self)
        if self.placement == "colocated":
            _check_colocated(self)
        if self.engine.kind == "inline":
            _check_inline(self)
        if self.generator.lora == "merged":
            _check_merged(self)
        if self.model.base != "auto":
            _check_base(self)
        _check_joining(self)
        if (self.task.kind == "verifiers") != (self.agent.environment == "verifiers"):
            raise ConfigError("agent.environment: must be verifiers with task.kind=verifiers, and only then")
        if self.agent:
            _check_agent(self)
        if self.sft:
            _check_sft(self)
        _check_teacher(self)
        if self.has_critic:
            _check_critic(self)
        if self.engine.mps_trainer_share < 1:
            _check_trainer_share(self)
        if self.evaluate.every and not self.evaluate.prompts:
            raise ConfigError("evaluate.every: cannot take effect with evaluate.prompts=0")

    @property
    def training_sampling(self) -> Sampling:
        return replace(self.generator.sampling, samples=self.schedule.samples_per_group)

    @property
    def greedy_sampling(self) -> Sampling:
        return Sampling(samples=1, max_new_tokens=self.generator.max_new_tokens, temperature=0.0)

    @property
    def score_name(self) -> str:
        """Name of an evaluation's mean score: "accuracy" if every answer is right or wrong, else "mean reward"."""
        scorer, graded = self.reward.scorer, bool(self.reward.combine or self.reward_model.path)
        graded = graded or (bool(self.agent) and self.agent.reward == "agent")
        programs = scorer == "code" or (scorer == "auto" and self.task.kind == "code")
        graded = graded or (programs and self.reward.tests == "share") or self._scored_by_sets
        return "accuracy" if scorer in RIGHT_OR_WRONG and not graded else "mean reward"

    @property
    def _scored_by_sets(self) -> bool:
        """Whether sets of reasoning-gym score answers; many of them give part of the reward for part of the answer."""
        return self.reward.scorer == "auto" and any(
            one.kind == "reasoning_gym" for one in (self.task, *self.task.parts)
        )

    @property
    def num_parked(self) -> int:
        """Conversations per generator that may wait for a tool's reply while others use the slots."""
        return self.generator.slots if self.conversation.tool else 0

    @property
    def supervised(self) -> bool:
        """Whether every group is a row of data, so that nothing is sampled but evaluations."""
        return bool(self.sft) and self.sft.share == 1

    @property
    def samples(self) -> bool:
        """Whether anything is sampled at all, so that there are generators and rewards."""
        return not self.supervised or bool(self.evaluate.prompts)

    @property
    def teacher_folders(self) -> dict[str, Path]:
        """Model folders of the teachers, by name; none for a teacher that is the policy's base with other adapters."""
        named = self.teacher.by_name or ({THE_TEACHER: self.teacher.path} if self.teacher.path else {})
        return {name: model_folder(path) for name, path in named.items()}

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.algo.advantage == "gae"

    @property
    def critic_alone(self) -> bool:
        """Whether the critic is an executor of its own."""
        return self.has_critic and self.critic.place == "own"

    @property
    def critic_folder(self) -> Path:
        return model_folder(self.critic.path or self.model.path)

    @property
    def critic_trainer(self) -> TrainerConfig:
        """How the critic is trained: as the policy, with its own learning rate and, if it has any, its own ranks."""
        critic, common = self.critic, replace(self.trainer, lr=self.critic.lr)
        if critic.place == "trainer":
            return common
        own = {"device": critic.device, "threads": critic.threads}
        return replace(common, replicate=1, data=critic.data, context=1, tensor=critic.tensor, expert=1, **own)

    @property
    def model_folder(self) -> Path:
        return model_folder(self.model.path)

    @property
    def adapter_folder(self) -> Path | None:
        """Folder of the adapters that training starts from; None: new ones."""
        return Path(self.model.adapter).expanduser() if self.model.adapter else None

    @property
    def generator_quantize(self) -> Literal["none", "fp8", "int8"]:
        """Precision of the generators' weights: that of a narrow base, where there is one."""
        return "fp8" if self.model.base == "fp8" else self.generator.quantize

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference on the trainer's ranks is the policy's own base, with its adapters switched off."""
        ours = not self.reference.model or self.reference_folder == self.model_folder
        return bool(self.model.lora) and not self.reference_alone and ours

    @property
    def reference_folder(self) -> Path:
        return model_folder(self.reference.model or self.model.path)

    @property
    def reference_alone(self) -> bool:
        """Whether the reference policy is an executor of its own."""
        return self.algo.reference_kl > 0 and self.reference.place == "own"


def model_folder(path: str) -> Path:
    """Folder of the model that a setting or an argument names. Names on the hub are resolved by `hub.models` first."""
    if path in SHIPPED_MODELS:
        return Path(__file__).parents[1] / "assets" / path
    return pinned_folder(path, "model") or Path(path).expanduser()


def _check_trainer_share(config: Config) -> None:
    trainer, others = config.trainer, config.has_critic or config.teacher or config.reference.model
    if trainer.ranks > 1 or trainer.dtype not in ("auto", "bfloat16") or config.model.lora or others:
        raise ConfigError(
            "engine.mps_trainer_share: is for a trainer of one rank in bfloat16, without LoRA, critic, teacher or another "
            "model as reference: on a part of a GPU, CUDA may compute wrong products, and only those of such jobs are tried"
        )


def _check_schedule(config: Config) -> None:
    schedule, generator = config.schedule, config.generator
    if schedule.samples_per_group == 1:
        _check_single_answers(config)
    if generator.slots < schedule.samples_per_group:
        raise ConfigError(
            f"generator.slots: {generator.slots} slots cannot hold one group of "
            f"schedule.samples_per_group={schedule.samples_per_group}"
        )
    if generator.stop and config.conversation.tool:
        raise ConfigError(
            "generator.stop: cannot take effect in conversations, whose turns end with the model's end token"
        )
    if schedule.deterministic and config.conversation.tool and generator.kv_pages:
        raise ConfigError(
            f"generator.kv_pages: with {generator.kv_pages} pages, timing decides which conversations are read again, "
            "which schedule.deterministic rules out; set it to 0"
        )


def _check_merged(config: Config) -> None:
    if not config.model.lora:
        raise ConfigError("generator.lora: merged cannot take effect without adapters; set model.lora.rank")
    if config.generator.quantize != "none":
        raise ConfigError(
            f"generator.lora: adapters cannot be merged into weights with generator.quantize={config.generator.quantize}; "
            "leave it at beside"
        )


def _check_base(config: Config) -> None:
    kind, generator = config.model.base, config.generator
    for key, dtype in (("trainer", config.trainer.dtype), ("generator", generator.dtype)):
        if kind == "bf16" and dtype not in ("auto", "bfloat16"):
            raise ConfigError(
                f"model.base: bf16 cannot take effect with {key}.dtype={dtype}; leave one of them at auto"
            )
    if kind != "fp8":
        return
    if generator.lora == "merged":
        raise ConfigError("model.base: adapters cannot be merged into fp8; set generator.lora to beside")
    if generator.quantize == "int8":
        raise ConfigError("model.base: fp8 is for trainer and generator alike; set generator.quantize to none")
    if config.trainer.dtype == "float16":
        raise ConfigError("model.base: fp8 products are computed in bfloat16; set trainer.dtype to auto")
    for key, ranks in (
        ("trainer.data, context, tensor and replicate", config.trainer.ranks),
        ("generator.tensor", generator.tensor),
    ):
        if ranks > 1:
            raise ConfigError(f"model.base: fp8 is not split over ranks; set {key} to 1")


def _check_agent(config: Config) -> None:
    if config.conversation.tool:
        raise ConfigError("agent: cannot take effect with conversation.tool; the agent calls its tools itself")
    if config.schedule.deterministic:
        raise ConfigError(
            "agent: agents' calls come in any order, which schedule.deterministic rules out; leave it false"
        )
    if config.reward_model.path:
        raise ConfigError("agent: a reward model judges single answers, not sessions; leave reward_model.path empty")
    if config.generator.stop:
        raise ConfigError("generator.stop: cannot take effect with agents, which send their own stop texts")


def _check_sft(config: Config) -> None:
    if config.agent:
        raise ConfigError(
            "sft.path: agents write their own prompts, so rows have no way beside them; leave one of them out"
        )
    if config.task.curriculum:
        raise ConfigError("sft.path: a curriculum counts groups of its own problems; set task.curriculum to false")
    if not config.supervised:
        return
    if config.schedule.dynamic_sampling or config.schedule.window > 1:
        raise ConfigError(
            "sft.share: 1 trains rows in their order; leave schedule.dynamic_sampling at 0 and schedule.window at 1"
        )
    if config.algo.reference_kl:
        raise ConfigError("algo.reference_kl: cannot take effect with sft.share=1, where nothing is sampled")
    if config.reward_model.path:
        raise ConfigError("reward_model.path: cannot take effect with sft.share=1, where nothing is sampled")
    if config.conversation.tool:
        raise ConfigError("conversation.tool: cannot take effect with sft.share=1, where nothing is sampled")


def _check_teacher(config: Config) -> None:
    teacher, named = config.teacher, {part.teacher for part in (config.task, *config.task.parts)} - {""}
    if unknown := sorted(named - teacher.by_name.keys()):
        raise ConfigError(f"task.teacher: '{unknown[0]}' is no name in teacher.by_name; name teachers there")
    if not config.algo.reward_weight and not (teacher or config.supervised):
        raise ConfigError("algo.reward_weight: 0 leaves nothing to learn from; it is for jobs with a teacher")
    if not config.algo.reward_weight and config.schedule.dynamic_sampling:
        raise ConfigError(
            "schedule.dynamic_sampling: replaces groups by rewards, which algo.reward_weight=0 leaves out"
        )
    if not teacher:
        return
    if config.supervised:
        raise ConfigError("teacher.path: teaches tokens that the policy samples; with sft.share=1 nothing is sampled")
    if teacher.url and config.generator.temperature != 1:
        raise ConfigError(
            "teacher.url: an endpoint's log-probs are those of temperature 1; set generator.temperature to 1"
        )
    if teacher.url and config.schedule.deterministic:
        raise ConfigError(
            "teacher.url: an endpoint may answer otherwise next time, which schedule.deterministic rules out"
        )
    if teacher.by_name and not named and not teacher.column:
        raise ConfigError("teacher.by_name: nothing names these teachers; set task.teacher, or teacher.column")
    if teacher.adapter and not config.model.lora:
        raise ConfigError(
            "teacher.adapter: needs adapters of the same layers in the policy; set model.lora, or teacher.path"
        )


def _check_single_answers(config: Config) -> None:
    if not config.has_critic and not config.supervised and config.algo.reward_weight:
        raise ConfigError(
            "schedule.samples_per_group: the reward of a single answer has nothing to be compared with; use at least 2, or a "
            "critic (algo.advantage: gae)"
        )
    if config.schedule.dynamic_sampling:
        raise ConfigError("schedule.dynamic_sampling: cannot take effect with single answers (samples_per_group=1)")


def _check_critic(config: Config) -> None:
    algo, critic = config.algo, config.critic
    if config.supervised:
        raise ConfigError("algo.advantage: gae needs sampled answers, and with sft.share=1 nothing is sampled")
    if not algo.reward_weight:
        raise ConfigError("algo.advantage: gae cannot take effect with algo.reward_weight=0, which leaves rewards out")
    if critic.head_start >= config.schedule.updates:
        raise ConfigError(
            f"critic.head_start: {critic.head_start} of schedule.updates={config.schedule.updates} updates; the policy would "
            "never move"
        )
    if config.model.adapter and not critic.path:
        raise ConfigError(
            "critic.path: a copy of the policy would leave out its adapters (model.adapter); name a folder, such as one "
            "that llamarl merge makes"
        )
    if config.trainer.dtype == "float16":
        raise ConfigError("trainer.dtype: float16 is for log-probs of policies; with a critic, leave it at auto")


def _check_joining(config: Config) -> None:
    if not config.generator.replicas and not config.engine.join:
        raise ConfigError("generator.replicas: 0 generators, and none can join; set engine.join, or at least 1")
    if config.engine.join and config.schedule.deterministic:
        raise ConfigError(
            "engine.join: hosts that come and go are not covered by schedule.deterministic=true; leave one of them out"
        )


def _check_colocated(config: Config) -> None:
    if config.schedule.max_staleness:
        raise ConfigError(
            f"placement: colocated executors take turns, so schedule.max_staleness={config.schedule.max_staleness} "
            "cannot take effect; set it to 0"
        )
    if config.generator.device != config.trainer.device:
        raise ConfigError(
            f"placement: colocated executors share their devices, but generator.device={config.generator.device} "
            f"and trainer.device={config.trainer.device}"
        )


def _beside_trainer(config: Config) -> tuple[tuple[OwnRanks, bool], ...]:
    """The models that work on batches before the trainer, and whether they have ranks of their own."""
    teacher = config.teacher, config.teacher.alone
    return (config.reference, config.reference_alone), teacher, (config.critic, config.critic_alone)


def _check_inline(config: Config) -> None:
    others = [one.ranks for one, there in _beside_trainer(config) if there]
    if max(config.generator.tensor, config.trainer.ranks, *others, 1) > 1:
        raise ConfigError(
            "engine: inline runs everything in one process; generator.tensor, trainer.data and so on need local"
        )
