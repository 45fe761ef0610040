"""Builds a generator: model, decoder, and the reader of its weights."""

from __future__ import annotations

from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, dtype_of, gpu_for
from llamarl.builders.weights import make_weight_reader, wire_precision
from llamarl.executors.executor import Executor
from llamarl.executors.generator import Generator
from llamarl.families.parameters import parameters
from llamarl.generate.conversation import make_conversations
from llamarl.generate.decoder import ContinuousDecoder, Limits, Precision
from llamarl.generate.loading import load_rank
from llamarl.generate.parallel import TensorRank
from llamarl.generate.stop_strings import StopStrings
from llamarl.layout.model import SCALE
from llamarl.model.checkpoint import open_checkpoint
from llamarl.model.shards import Shard
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer


def build_generator(context: BuildContext) -> Executor:
    config, settings = context.config, context.config.generator
    part = TensorRank(context.rank, context.num_ranks)
    device = device_of("generator.device", settings.device, gpu_for(context))
    precision = Precision.of(settings, keep_wide=wire_precision(config) != "fp8")
    checkpoint = open_checkpoint(config.model_folder)
    model = load_rank(
        checkpoint.shape,
        part,
        precision,
        dtype=dtype_of(settings.dtype, device),
        device=device,
        fill=lambda memory: checkpoint.fill(memory, part.box),
    )
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
        stop=StopStrings(tokenizer, settings.stop),
    )
    return Generator(
        decoder,
        make_weight_reader(context, held_shards(model, part), device),
        make_conversations(config, decoder, tokenizer, part) if config.conversation.tool else None,
        max_failure_share=config.conversation.max_failure_share,
        deterministic=config.schedule.deterministic,
        log=context.log,
    )


def held_shards(model: Transformer, part: TensorRank) -> dict[str, Shard]:
    """Maps each parameter of a generator rank to its shard; quantized ones have a shard of their scales too."""
    specs = parameters(model.shape)
    held = {name: Shard(tensor, part.box(specs[name])) for name, tensor in model.named_parameters()}
    for name, scale in model.named_buffers():
        rows, (first_column, _) = held[name.removesuffix(SCALE)].box
        segment = part.rank if first_column else 0  # one for each rank, where ranks share rows
        held[name] = Shard(scale, (rows, (segment, segment + 1)))
    return held
