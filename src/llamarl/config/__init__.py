"""Every setting of a job with its default, limits and meaning. Settings are read-only.

There is one file per section of the YAML file. `llamarl config` prints all of them as a commented YAML file. A value that
follows from other values is a property, not a setting.
"""

from __future__ import annotations

from llamarl.config.agent import AgentConfig
from llamarl.config.algo import AlgoConfig
from llamarl.config.conversation import ConversationConfig
from llamarl.config.critic import CriticConfig
from llamarl.config.engine import EngineConfig, HostConfig
from llamarl.config.evaluate import EvaluateConfig
from llamarl.config.generator import GeneratorConfig
from llamarl.config.job import Config, model_folder
from llamarl.config.llm_judge import LLMJudgeConfig
from llamarl.config.lora import LoraConfig
from llamarl.config.model import ModelConfig
from llamarl.config.observe import ObserveConfig
from llamarl.config.reference import ReferenceConfig
from llamarl.config.reward import RewardConfig
from llamarl.config.reward_model import RewardModelConfig
from llamarl.config.sandbox import SandboxConfig
from llamarl.config.schedule import ScheduleConfig
from llamarl.config.section import Section
from llamarl.config.sft import SftConfig
from llamarl.config.snapshots import SnapshotsConfig
from llamarl.config.task import DatasetConfig, MixturePart, TaskConfig
from llamarl.config.teacher import TeacherConfig
from llamarl.config.trainer import TrainerConfig
from llamarl.config.weights import WeightsConfig

__all__ = [
    "AgentConfig",
    "AlgoConfig",
    "Config",
    "ConversationConfig",
    "CriticConfig",
    "DatasetConfig",
    "EngineConfig",
    "EvaluateConfig",
    "GeneratorConfig",
    "HostConfig",
    "LLMJudgeConfig",
    "LoraConfig",
    "MixturePart",
    "ModelConfig",
    "ObserveConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "SandboxConfig",
    "ScheduleConfig",
    "Section",
    "SftConfig",
    "SnapshotsConfig",
    "TaskConfig",
    "TeacherConfig",
    "TrainerConfig",
    "WeightsConfig",
    "model_folder",
]
