"""How trainer, reference and critic compute their passes, and whether their ranks can share the model."""

from __future__ import annotations

import torch

from llamarl.builders.devices import check_gpus, device_of, dtype_of
from llamarl.config import Config, TrainerConfig
from llamarl.config.section import OwnRanks
from llamarl.errors import ConfigError, ModelError
from llamarl.layout.model import check_shared
from llamarl.model.checkpoint import check_headers
from llamarl.model.hf_config import read_shape
from llamarl.model_spec import ModelSpec
from llamarl.train.attention import not_by_cudnn
from llamarl.train.mesh import TrainerMesh
from llamarl.train.policy import ComputeSettings


def compute_settings(config: Config, device: torch.device, mesh: TrainerMesh) -> ComputeSettings:
    """`auto` means bf16 and compiled blocks on a GPU, fp32 and plain blocks elsewhere."""
    settings, on_gpu = config.trainer, device.type == "cuda"
    return ComputeSettings(
        device,
        dtype_of(settings.dtype, device),
        mesh,
        recompute=settings.recompute,
        compiled=on_gpu if settings.compile == "auto" else settings.compile == "on",
        tokens_per_pack=settings.tokens_per_pack,
        temperature=config.generator.temperature,
        lora=config.model.lora,
        share_prompts=settings.share_prompts,
        cudnn_from=settings.cudnn_from,
    )


def check_training(config: Config) -> None:
    """Refuse what a user can get wrong about the ranks of trainer and reference, before anything starts."""
    shape = read_shape(config.model_folder)
    check_ranks("trainer", config.trainer, shape, config)
    if config.trainer.cudnn_from:
        if device_of("trainer.device", config.trainer.device).type != "cuda":
            raise ConfigError("trainer.cudnn_from: cuDNN's attention needs a GPU; set it to 0")
        if reason := not_by_cudnn(shape):
            raise ConfigError(f"trainer.cudnn_from: cuDNN's attention has no {reason}; set it to 0")
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
        check_ranks("reference", config.reference, reference, config)


def check_ranks(
    section: str,
    settings: TrainerConfig | OwnRanks,
    shape: ModelSpec,
    config: Config,
) -> None:
    """Refuse ranks that cannot share the model, or for which there are no GPUs."""
    expert = settings.expert if isinstance(settings, TrainerConfig) else 1
    check_shared(shape, settings.tensor, expert, section)
    device = device_of(f"{section}.device", settings.device)
    replicate, context = (settings.replicate, settings.context) if isinstance(settings, TrainerConfig) else (1, 1)
    copies, sharing = ("" if replicate == 1 else f"{replicate} * "), ("" if context == 1 else f" * {context}")
    check_gpus(f"{section}.data: {copies}{settings.data}{sharing} * {settings.tensor}", settings.ranks, device, config)
