"""How weights leave the trainer and reach the generators: transport, precision, writer and reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, dtype_of, generator_devices, trainer_devices
from llamarl.config import Config
from llamarl.controller.line import role_of
from llamarl.layout.mesh import PRECISIONS
from llamarl.messages import ReaderStuck
from llamarl.model.hf_config import read_shape
from llamarl.model.shards import Parameters
from llamarl.model_spec import ModelSpec
from llamarl.process_groups import interface_for, max_over_ranks, true_on_all_ranks
from llamarl.train.policy import Policy
from llamarl.train.shards import trained_shards
from llamarl.weights.group_transport import GroupWriter
from llamarl.weights.memory import HOST
from llamarl.weights.rendezvous import RendezvousReader
from llamarl.weights.select_transport import Place, Transport, select_transport, settle_transport
from llamarl.weights.slots import SlotReader, SlotWriter, alone
from llamarl.weights.transport import NoReaders, WeightReader, WeightWriter
from llamarl.weights.wire import WireFormat


def make_weight_writer(context: BuildContext, policy: Policy) -> WeightWriter:
    """This rank's part of every publication: in device memory where all readers reach it, otherwise in host memory; or, for
    readers on other hosts, in its own memory, from which they pull. Replicas share the sending to other hosts; slots are
    filled by the first replica alone."""
    if not context.weights_source:
        return NoReaders()
    shards, fills = trained_shards(policy.model), policy.computing.mesh.replica == 0
    wire = wire_format(context.config, policy.model.shape)
    agree, lease_s = max_over_ranks if context.num_ranks > 1 else alone, context.config.weights.lease_s
    if context.rendezvous is not None:
        writer = GroupWriter(shards, lease_s=lease_s, wire=wire, agree=agree)
        context.rendezvous.serve(writer)
        return writer
    transport, device = weight_transport(context.config, context.first_gpus), policy.computing.device
    return SlotWriter(
        context.slots[role_of(context.executor)],
        shards if fills else {},
        wire=wire,
        lease_s=lease_s,
        on_stuck=lambda pid: context.tell_engine(ReaderStuck(pid)),
        rank=context.rank,
        num_ranks=context.num_ranks,
        agree=agree,
        device=(device.index or 0) if transport == "cuda" and fills else HOST,
    )


def make_weight_reader(context: BuildContext, held: Parameters, device: torch.device) -> WeightReader:
    if context.rendezvous is None:
        return SlotReader(context.slots[context.weights_source[role_of(context.executor)]], held)
    return RendezvousReader(
        context.rendezvous,
        held,
        device,
        num_readers=context.num_ranks,
        limit_s=context.config.weights.lease_s,
        all_true=true_on_all_ranks if context.num_ranks > 1 else lambda mine: mine,
    )


def weight_transport(
    config: Config,
    first_gpus: Mapping[str, int],
    can_reach: Callable[[int, int], bool] = torch.cuda.can_device_access_peer,
) -> Transport:
    """A process group where hosts are named; otherwise what the devices of this host allow. The default `can_reach` starts
    CUDA to find out whether GPUs reach each other."""
    if config.engine.hosts:
        interface_for(config.engine.host_names, config.engine.trusted_network)
        return settle_transport(config.weights.transport, "group")
    sides = (trainer_devices(config, first_gpus), generator_devices(config, first_gpus))
    writers, readers = ([Place("this host", str(device)) for device in side] for side in sides)
    possible = select_transport(writers, readers, config.engine.trusted_network, can_reach)
    return settle_transport(config.weights.transport, possible)


def applied_types(config: Config) -> tuple[torch.dtype, ...]:
    """The types that adapters change to on their way into a generator: on the wire, and there."""
    held = dtype_of(config.generator.dtype, device_of("generator.device", config.generator.device))
    wire: torch.dtype = getattr(torch, PRECISIONS[wire_precision(config)])
    return wire, held


def wire_format(config: Config, shape: ModelSpec) -> WireFormat:
    """Types in which weights travel. Adapters are never quantized."""
    if config.model.lora:
        return WireFormat(wire_precision(config))
    return WireFormat.for_generator(wire_precision(config), shape, config.generator.tensor)


def wire_precision(config: Config) -> str:
    """The precision in which weights travel: that of the generators, which halves the bytes where it is narrower. fp16
    generators receive the trainer's own bf16 numbers. int8 is made on arrival, and so is fp8 where trainer ranks share a row
    that has one scale, and of models with experts."""
    device = device_of("generator.device", config.generator.device)
    dtype = dtype_of(config.generator.dtype, device)
    whole_rows = config.generator.tensor % config.trainer.tensor == 0
    if config.generator.quantize == "fp8" and dtype == torch.bfloat16 and whole_rows and not config.model.lora:
        return "bf16" if read_shape(config.model_folder).experts else "fp8"
    return "fp32" if dtype == torch.float32 else "bf16"
