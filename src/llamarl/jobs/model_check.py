"""Whether the model folder can serve the job: its files, its tokenizer, and the lengths that the job asks for."""

from __future__ import annotations

import torch

from llamarl.builders.devices import device_of, dtype_of
from llamarl.config import Config
from llamarl.errors import ConfigError, InputError, ModelError
from llamarl.families.adapters import adapter_parameters
from llamarl.generate.limits import Limits
from llamarl.generate.parallel import TensorRank
from llamarl.model.adapter_folder import check_base_of, check_same, open_adapter
from llamarl.model.checkpoint import check_headers
from llamarl.model.hf_config import describe_ignored_keys
from llamarl.model.tokenizer import Tokenizer
from llamarl.model_spec import ModelSpec

EXPERT_RANKS = 8  # a GPU multiplies matrices by group whose rows are multiples of 16 bytes


def check_model(config: Config) -> tuple[Tokenizer, list[str]]:
    """The policy's tokenizer, and notes for the user."""
    try:
        return _check(config)
    except ModelError as error:
        raise ModelError(f"model.path: {error}") from None


def _check_adapters(config: Config, shape: ModelSpec) -> None:
    """Refuses layers that the model does not have, and a folder of adapters that are not those of `model.lora`."""
    adapter_parameters(shape, config.model.lora)
    if folder := config.adapter_folder:
        try:
            check_same(config.model.lora, open_adapter(folder, shape))
            check_base_of(folder, config.model_folder)
        except InputError as error:
            raise ConfigError(f"model.adapter: {error}") from None


def _check_experts(config: Config, shape: ModelSpec) -> None:
    """Refuses precisions that products by expert do not have, and ranks for experts where there are none."""
    if not shape.experts:
        if config.trainer.balance_loss:
            raise ConfigError("trainer.balance_loss: this model has no experts to balance; leave it at 0")
        for key, ranks in (("trainer.expert", config.trainer.expert), ("generator.expert", config.generator.expert)):
            if ranks > 1:
                raise ConfigError(f"{key}: {ranks}, but {config.model.path} has no experts; set it to 1")
        return
    if config.model.base == "fp8":
        raise ConfigError("model.base: fp8, but experts are trained in their own precision; leave it out")
    for key, settings in (("trainer", config.trainer), ("generator", config.generator)):
        device = device_of(f"{key}.device", settings.device)
        dtype = dtype_of(settings.dtype, device)
        if dtype == torch.float16 or (device.type == "cuda" and dtype != torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"{key}.dtype: {name}, but experts compute in bfloat16 on a GPU; set {key}.dtype=auto")
    adapted = any(one.by_expert for one in adapter_parameters(shape, config.model.lora).values())
    on_gpu = device_of("trainer.device", config.trainer.device).type == "cuda"
    if adapted and on_gpu and config.model.lora.rank % EXPERT_RANKS:
        raise ConfigError(
            f"model.lora.rank: {config.model.lora.rank}, but adapters of experts on a GPU need a multiple of "
            f"{EXPERT_RANKS}; change it, or set model.lora.targets=attention"
        )


def _check_beside(config: Config) -> None:
    if config.generator.prefill_beside and device_of("generator.device", config.generator.device).type != "cuda":
        raise ConfigError("generator.prefill_beside: prompts are read beside answers on a GPU only; set it to 0")


def _check(config: Config) -> tuple[Tokenizer, list[str]]:
    folder = config.model_folder
    shape = check_headers(folder)
    _check_adapters(config, shape)
    _check_experts(config, shape)
    _check_beside(config)
    notes = [*filter(None, [describe_ignored_keys(folder)])]
    length = config.generator.max_prompt_tokens + config.generator.max_new_tokens
    if length > shape.max_positions:
        left = shape.max_positions - config.generator.max_prompt_tokens
        raise ConfigError(
            f"generator.max_new_tokens: prompt and completion may take {length} tokens, "
            f"but {config.model.path} has {shape.max_positions} positions"
            + (f"; at most {left} are left for a completion" if left > 0 else "")
        )
    limits = Limits.of(config)
    limits.check_pages(limits.num_pages or limits.enough_pages)
    TensorRank(0, config.generator.tensor, config.generator.expert).check(shape)
    tokenizer = Tokenizer.load(folder, config.task.chat_options)
    if tokenizer.vocab_size > shape.vocab_size:
        raise ModelError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} tokens, its model only {shape.vocab_size}"
        )
    if not tokenizer.eos_ids:
        raise ModelError(f"{folder} names no end token, so completions could not end")
    return tokenizer, notes
