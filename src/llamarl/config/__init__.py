"""Every setting of a job, with its default, limits and meaning: said once, here. Read, never written.

`llamarl config` prints these files as a table. What follows from other values is a property, not a setting.
"""

from __future__ import annotations

from llamarl.config.asking import Conversation, Model, Part, Source, Task
from llamarl.config.judging import LLMJudge, Reward, RewardModel, Sandbox
from llamarl.config.learning import Algo, Generator, Reference, Trainer
from llamarl.config.running import Engine, Evaluate, Host, Observe, Schedule, Snapshots, Weights
from llamarl.config.section import Section
from llamarl.config.whole import Config, model_folder

__all__ = [
    "Algo",
    "Config",
    "Conversation",
    "Engine",
    "Evaluate",
    "Generator",
    "Host",
    "LLMJudge",
    "Model",
    "Observe",
    "Part",
    "Reference",
    "Reward",
    "RewardModel",
    "Sandbox",
    "Schedule",
    "Section",
    "Snapshots",
    "Source",
    "Task",
    "Trainer",
    "Weights",
    "model_folder",
]
