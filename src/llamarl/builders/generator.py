"""Builds a generator: model, decoder, and the reader of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from llamarl.builders.base import generator_has_base, load_base
from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, dtype_of, gpu_for
from llamarl.builders.weights import make_weight_reader, wire_precision
from llamarl.config import Config
from llamarl.config.lora import NO_LORA
from llamarl.executors.executor import Executor
from llamarl.executors.generator import Generator
from llamarl.families.adapters import trained_parameters
from llamarl.generate.adapter_check import AdapterCheck
from llamarl.generate.conversation import make_conversations
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.drafts import DraftChoice
from llamarl.generate.limits import Limits, Precision
from llamarl.generate.loading import load_rank
from llamarl.generate.parallel import TensorRank
from llamarl.generate.stop_strings import StopStrings
from llamarl.layout.boxes import shape_of
from llamarl.layout.model import SCALE
from llamarl.model.checkpoint import open_checkpoint
from llamarl.model.lora import Adapters
from llamarl.model.lora_serving import merge_adapters, serve_adapters
from llamarl.model.shards import Shard
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer
from llamarl.types import CompletionGroup


def build_generator(context: BuildContext) -> Executor:
    config, settings = context.config, context.config.generator
    part = TensorRank(context.rank, context.num_ranks, settings.expert)
    device = device_of("generator.device", settings.device, gpu_for(context))
    precision = Precision(
        weights=config.generator_quantize,
        kv_cache=settings.kv_cache,
        keep_wide=not config.model.lora and wire_precision(config) != "fp8",
    )
    model = load_weights(context, part, precision, device)
    tokenizer = Tokenizer.load(config.model_folder, config.task.chat_options)
    decoder = ContinuousDecoder(
        model,
        Limits.of(config),
        eos_ids=tokenizer.eos_ids,
        seed=config.seed,
        recompute=settings.kv_on_new_weights == "recompute",
        tensor_ranks=part.count,
        precision=precision,
        max_turns=config.conversation.max_turns if config.conversation.tool else 1,
        add_adapters=partial(add_adapters, config=config, part=part) if config.model.lora else None,
        stop=StopStrings(tokenizer, settings.stop),
        drafts=DraftChoice(settings.draft),
        record_routes=config.trainer.replay_routes,
    )
    return Generator(
        decoder,
        make_weight_reader(context, held_shards(model, part), device),
        make_conversations(config, decoder, tokenizer, part) if config.conversation.tool else None,
        max_failure_share=config.conversation.max_failure_share,
        deterministic=config.schedule.deterministic,
        log=context.log,
        adapters=AdapterCheck(decoder, part, partial(is_measured, config)) if config.model.lora else None,
        tokenizer=tokenizer,
        prepare=partial(decoder.prepare, filtered=settings.sampling.filtered) if model.lm_head.weight.is_cuda else None,
    )


def load_weights(context: BuildContext, part: TensorRank, precision: Precision, device: torch.device) -> Transformer:
    """This rank's part of the model; with adapters, the base that it shares with the trainer if it can."""
    config, dtype = context.config, dtype_of(context.config.generator.dtype, device)
    if generator_has_base(config):
        return load_base(context, config.model_folder, device, dtype).model()
    checkpoint = open_checkpoint(config.model_folder)

    def fill(memory: Mapping[str, Tensor]) -> None:
        checkpoint.fill(memory, part.box)

    return load_rank(checkpoint.shape, part, precision, dtype=dtype, device=device, fill=fill)


def add_adapters(model: Transformer, config: Config, part: TensorRank) -> Adapters:
    """Gives a generator rank adapters, of which every version arrives: beside the base, or merged into a copy of it."""
    add = merge_adapters if config.generator.lora == "merged" else serve_adapters
    return add(model, config.model.lora, lambda parameter: shape_of(part.box(parameter)))


def is_measured(config: Config, group: CompletionGroup) -> bool:
    """Whether the trainer compares the effect of the adapters on this group: on probes, and, where all groups are sampled by
    the version that is trained, on the first group of every update that would have a probe."""
    schedule = config.schedule
    if schedule.max_staleness or config.agent or not schedule.probe_every:
        return group.kind == "probe"
    return group.kind == "train" and group.ordinal % (schedule.groups_per_update * schedule.probe_every) == 0


def held_shards(model: Transformer, part: TensorRank) -> dict[str, Shard]:
    """Maps each parameter of a generator rank that arrives with a version (all, or the adapters) to its shard. Quantized ones
    have a shard of their scales too."""
    specs = trained_parameters(model.shape, model.adapters.lora if model.adapters else NO_LORA)
    found = {name: tensor for name, tensor in model.named_parameters() if name in specs}
    held = {name: Shard(tensor, part.box(specs[name])) for name, tensor in found.items()}
    for name, scale in () if model.adapters else model.named_buffers():
        rows, (first_column, _) = held[name.removesuffix(SCALE)].box
        segment = part.rank if first_column else 0  # one for each rank, where ranks share rows
        held[name] = Shard(scale, (rows, (segment, segment + 1)))
    return held
