"""Builds a reward model: a classifier and the tokenizers of both models."""

from __future__ import annotations

from pathlib import Path

from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, dtype_of, gpu_for
from llamarl.config import Config, model_folder
from llamarl.errors import ModelError
from llamarl.executors.executor import Executor
from llamarl.executors.reward_model import RewardModel
from llamarl.model.classifier import load_classifier, open_classifier
from llamarl.model.tokenizer import Tokenizer


def build_reward_model(context: BuildContext) -> Executor:
    config, settings = context.config, context.config.reward_model
    device = device_of("reward_model.device", settings.device, gpu_for(context))
    folder = reward_model_folder(config)
    return RewardModel(
        load_classifier(folder, dtype=dtype_of(settings.dtype, device), device=device),
        Tokenizer.load(folder),
        Tokenizer.load(config.model_folder),
        settings,
        judged=config.conversation.judge,
    )


def reward_model_folder(config: Config) -> Path:
    return model_folder(config.reward_model.path)


def check_reward_model(config: Config) -> None:
    """Refuse files that cannot be read and a device that is not there, before anything starts."""
    try:
        open_classifier(reward_model_folder(config))
        Tokenizer.load(reward_model_folder(config))
    except ModelError as error:
        raise ModelError(f"reward_model.path: {error}") from None
    device_of("reward_model.device", config.reward_model.device)
