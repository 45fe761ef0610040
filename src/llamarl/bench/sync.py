"""`llamarl bench sync`: times the transfer of weights from trainer to generator, with one real process per rank.

A round lasts from the command to publish until the last generator rank has loaded. Commands and replies go through a third
process, as in a job. Readers verify every publication. The ranks hold random numbers, and the received ones are compared with
those sent.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from random import Random
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from llamarl.bench.actors import Actor, Actors
from llamarl.bench.decode_floor import bench_lora
from llamarl.bench.machine import best_s
from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.errors import InputError, JobFailed
from llamarl.families.adapters import trained_parameters
from llamarl.families.family import ParameterSpec
from llamarl.layout.boxes import Box, shape_of
from llamarl.layout.mesh import PRECISIONS, Side, box_on
from llamarl.layout.model import FP8, SCALE, placement_of, scale_box, wire_dtype
from llamarl.model.adapter_digest import AdapterHash, HashedPart, PendingHash
from llamarl.model.shards import Parameters, Shard
from llamarl.model_spec import ModelSpec
from llamarl.weights.group import Group
from llamarl.weights.group_transport import GroupReader, GroupWriter
from llamarl.weights.memory import HOST
from llamarl.weights.select_transport import Place, Transport, select_transport
from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter
from llamarl.weights.transport import WeightReader, WeightWriter
from llamarl.weights.wire import WireFormat

_LEASE_S = 120.0
_WARM_UP = 3
_PATTERN = (1 << 20) - 3  # random numbers that are repeated to fill the parameters; odd, so that rows differ
_PROBES = 64


class SyncCase(Struct, frozen=True):
    """What is measured: a model, the mesh of each end, and the transport."""

    model: str
    trainer: str
    generator: str
    rounds: int = 50
    transport: Transport | Literal["auto"] = "auto"
    lora: int = 0  # rank of adapters, which are then all that travels; 0: all weights do


class SyncResult(Struct, frozen=True):
    """The figures of a transfer benchmark; times are medians over the rounds."""

    case: SyncCase
    transport: Transport
    device: str
    bytes: int  # total received by all generator ranks in one round
    end_to_end_ms: float
    publish_ms: float
    load_ms: float
    slowest_ms: float  # slowest round, end to end
    gb_s: float
    copy_ms: float  # time of a plain copy of the same bytes in the same memory


class BenchRank:
    """One rank of either end, with its own shards of random parameters."""

    def __init__(self, shape: ModelSpec, lora: LoraConfig, side: Side, rank: int, device: str) -> None:
        self.device, self.shards = torch.device(device), dict[str, Shard]()
        self._specs, self._lora = trained_parameters(shape, lora), lora
        for parameter in self._specs.values():
            box = box_on(rank, parameter.shape, placement_of(parameter), side.mesh)
            self.add(parameter.name, box, self.dtype_of(parameter))

    def add(self, name: str, box: Box, dtype: torch.dtype) -> None:
        self.shards[name] = Shard(torch.zeros(shape_of(box), dtype=dtype, device=self.device), box)

    def dtype_of(self, parameter: ParameterSpec) -> torch.dtype:
        raise NotImplementedError

    def probe(self, places: Sequence[tuple[str, list[int]]]) -> list[float | None]:
        """The numbers at these indices of whole parameters; None where another rank holds them."""
        return [self._at(name, at) for name, at in places]

    def _at(self, name: str, at: list[int]) -> float | None:
        tensor, box = self.shards[name]
        inside = [index - first for index, (first, _) in zip(at, box, strict=True)]
        if not all(0 <= index < size for index, size in zip(inside, tensor.shape, strict=True)):
            return None
        return float(tensor[tuple(inside)].item())

    def begin_hash(self, hashed: AdapterHash) -> PendingHash | None:
        """Hash of the adapters, if there are any."""
        return PendingHash(hashed.total(self._parts)) if self._lora else None

    @cached_property
    def _parts(self) -> list[HashedPart]:
        return [
            HashedPart(name, one.tensor, one.box, self._specs[name].shape, self._lora.scale)
            for name, one in self.shards.items()
        ]

    def copy_s(self, num_bytes: int) -> float:
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return best_s(lambda: target.copy_(source), self.device)


class TrainerRank(BenchRank):
    """A rank that publishes weights."""

    def __init__(
        self, shape: ModelSpec, lora: LoraConfig, side: Side, rank: int, device: str, wire: torch.dtype
    ) -> None:
        self._dtype: torch.dtype = getattr(torch, PRECISIONS[side.precision])
        super().__init__(shape, lora, side, rank, device)
        self._hash = AdapterHash(self.device, (wire, wire))
        numbers = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(rank)).to(self.device, self._dtype)
        for tensor, _ in self.shards.values():
            _fill(tensor.view(-1), numbers)

    def dtype_of(self, parameter: ParameterSpec) -> torch.dtype:
        return self._dtype

    def connect(self, make: Callable[[Parameters], WeightWriter]) -> TrainerRank:
        self._writer, self._edition = make(self.shards), 0
        return self

    def agree(self, flags: Tensor) -> None:
        """Stand-in for the ranks' agreement: all are told the same version by the same process, so they agree already."""
        if flags.item() > 1:
            flags.fill_(self._edition)

    def publish(self, version: int) -> tuple[float, float]:
        self._edition, start_s = version + 2, time.monotonic()
        pending = self.begin_hash(self._hash)
        self._writer.publish(version)
        _text(pending)
        return start_s, time.monotonic()

    def hashed(self) -> str:
        return _text(self.begin_hash(self._hash))


class GeneratorRank(BenchRank):
    """A rank that loads weights."""

    def __init__(
        self, shape: ModelSpec, lora: LoraConfig, side: Side, rank: int, device: str, wire: WireFormat
    ) -> None:
        self._precision = side.precision
        super().__init__(shape, lora, side, rank, device)
        self._hash = AdapterHash(self.device)
        for name, segments in wire.segments.items():
            self.add(name + SCALE, scale_box(self.shards[name].box, segments.width), torch.float32)

    def dtype_of(self, parameter: ParameterSpec) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, wire_dtype(parameter, self._precision))
        return dtype

    def connect(self, make: Callable[[Parameters], WeightReader]) -> GeneratorRank:
        self._reader = make(self.shards)
        return self

    def load(self, version: int) -> tuple[float, float, int]:
        start_s = time.monotonic()
        num_bytes = self._reader.load(version)
        _text(self.begin_hash(self._hash))
        return start_s, time.monotonic(), num_bytes

    def hashed(self) -> str:
        return _text(self.begin_hash(self._hash))


def _text(pending: PendingHash | None) -> str:
    return pending.text() if pending else ""


def _fill(flat: Tensor, numbers: Tensor) -> None:
    whole = len(flat) // len(numbers)
    flat[: whole * len(numbers)].view(whole, len(numbers)).copy_(numbers.expand(whole, -1))
    flat[whole * len(numbers) :].copy_(numbers[: len(flat) - whole * len(numbers)])


class Ends:
    """All ranks of both ends, each in its own process, connected by one transport."""

    def __init__(
        self,
        shape: ModelSpec,
        trainer: Side,
        generator: Side,
        transport: Transport | Literal["auto"],
        lora: LoraConfig = NO_LORA,
    ) -> None:
        self._shape, self._sides, self._lora = shape, (trainer, generator), lora
        tp = generator.mesh.size("tp")
        wire = "bf16" if generator.precision == "fp8" else generator.precision  # of adapters
        self._wire = WireFormat(wire) if lora else WireFormat.for_generator(generator.precision, shape, tp)
        self._wire_dtype: torch.dtype = getattr(torch, PRECISIONS[wire])
        sizes = (trainer.mesh.num_ranks, generator.mesh.num_ranks)
        self._sizes = sizes
        self.devices = [[_device(rank) for rank in range(size)] for size in sizes]
        self.transport = _settled(transport, self.devices)
        self._file = SlotFile()
        self._rendezvous = os.memfd_create("llamarl-rendezvous", os.MFD_CLOEXEC)
        threads = max(1, (os.cpu_count() or 1) // max(sizes))
        self.trainers, self.generators = Actors(), Actors()
        self.trainers.extend(Actor(self._trainer(rank), threads, _LEASE_S) for rank in range(sizes[0]))
        self.generators.extend(Actor(self._generator(rank), threads, _LEASE_S) for rank in range(sizes[1]))

    def _trainer(self, rank: int) -> Callable[[], TrainerRank]:
        def make() -> TrainerRank:
            made = TrainerRank(self._shape, self._lora, self._sides[0], rank, self.devices[0][rank], self._wire_dtype)
            return made.connect(lambda held: self._writer(held, rank, made))

        return make

    def _writer(self, held: Parameters, rank: int, made: TrainerRank) -> WeightWriter:
        if self.transport == "group":
            writer = GroupWriter(held, lease_s=_LEASE_S, wire=self._wire, agree=made.agree)
            writer.serve(Group.on_this_host(self._rendezvous, rank, *self._sizes, device=made.device))
            return writer
        return SlotWriter(
            self._file,
            held,
            lease_s=_LEASE_S,
            wire=self._wire,
            rank=rank,
            num_ranks=self._sizes[0],
            agree=made.agree,
            device=(made.device.index or 0) if self.transport == "cuda" else HOST,
        )

    def _generator(self, rank: int) -> Callable[[], GeneratorRank]:
        def make() -> GeneratorRank:
            made = GeneratorRank(self._shape, self._lora, self._sides[1], rank, self.devices[1][rank], self._wire)
            return made.connect(lambda held: self._reader(held, rank, made))

        return make

    def _reader(self, held: Parameters, rank: int, made: GeneratorRank) -> WeightReader:
        if self.transport == "group":
            group = Group.on_this_host(self._rendezvous, self._sizes[0] + rank, *self._sizes, device=made.device)
            return GroupReader(group, held, deadline_s=_LEASE_S)
        return SlotReader(self._file, held)

    def close(self) -> None:
        for actor in (*self.trainers, *self.generators):
            actor.close()
        self._file.close()
        os.close(self._rendezvous)


def _device(rank: int) -> str:
    count = torch.cuda.device_count()
    return f"cuda:{rank % count}" if count else "cpu"


def _settled(transport: Transport | Literal["auto"], devices: Sequence[Sequence[str]]) -> Transport:
    writers, readers = ([Place("this host", device) for device in side] for side in devices)
    if transport == "auto":
        return select_transport(writers, readers, can_reach=torch.cuda.can_device_access_peer)
    ranks = [*devices[0], *devices[1]]
    if transport == "cuda" and "cpu" in ranks:
        raise InputError("--transport cuda: there is no CUDA device here")
    if transport == "group" and "cpu" not in ranks and len(set(ranks)) < len(ranks):
        raise InputError(
            f"--transport group: NCCL needs a GPU for each of {len(ranks)} ranks; there are {len(set(ranks))}"
        )
    return transport


def default_model() -> str:
    return "llama-3.2-1b" if torch.cuda.device_count() else "smollm2-135m"


def bench_sync(shape: ModelSpec, trainer: Side, generator: Side, case: SyncCase) -> SyncResult:
    """Measure the transfer of weights between two meshes."""
    if PRECISIONS[trainer.precision] == FP8:
        raise InputError("--trainer: a trainer holds fp32, bf16 or fp16; fp8 is what a generator may hold")
    lora = bench_lora(shape, case.lora)
    ends = Ends(shape, trainer, generator, case.transport, lora)
    try:
        rounds = [_round(ends, version) for version in range(_WARM_UP + case.rounds)][_WARM_UP:]
        if PRECISIONS[generator.precision] != FP8:
            _compare(ends, trained_parameters(shape, lora), getattr(torch, PRECISIONS[generator.precision]))
        _compare_hashes(ends)
        num_bytes = rounds[-1].num_bytes
        copy_s = ends.trainers[0].call("copy_s", num_bytes)
    finally:
        ends.close()
    end_to_end_s = [one.end_to_end_s for one in rounds]
    median_s = statistics.median(end_to_end_s)
    return SyncResult(
        case=case,
        transport=ends.transport,
        device=torch.cuda.get_device_name() if torch.cuda.device_count() else f"CPU, {os.cpu_count()} cores",
        bytes=num_bytes,
        end_to_end_ms=1e3 * median_s,
        publish_ms=1e3 * statistics.median(one.publish_s for one in rounds),
        load_ms=1e3 * statistics.median(one.load_s for one in rounds),
        slowest_ms=1e3 * max(end_to_end_s),
        gb_s=num_bytes / median_s / 1e9,
        copy_ms=1e3 * copy_s,
    )


class SyncRound(Struct, frozen=True):
    """Times of one round."""

    end_to_end_s: float
    publish_s: float
    load_s: float
    num_bytes: int


def _round(ends: Ends, version: int) -> SyncRound:
    published = ends.trainers.call_all("publish", version)
    loaded = ends.generators.call_all("load", version)
    begin_s = min(start_s for start_s, _ in published)
    return SyncRound(
        end_to_end_s=max(end_s for _, end_s, _ in loaded) - begin_s,
        publish_s=max(end_s for _, end_s in published) - begin_s,
        load_s=max(end_s for _, end_s, _ in loaded) - min(start_s for start_s, _, _ in loaded),
        num_bytes=sum(num_bytes for _, _, num_bytes in loaded),
    )


def _compare_hashes(ends: Ends) -> None:
    """Raise JobFailed unless both ends hash the same adapters, where each end is one rank."""
    sent, received = ends.trainers.call_all("hashed"), ends.generators.call_all("hashed")
    if len(sent) == len(received) == 1 and sent != received:
        raise JobFailed(f"bench sync: the generator hashes its adapters to {received[0]}, the trainer to {sent[0]}")


def _compare(ends: Ends, specs: Mapping[str, ParameterSpec], dtype: torch.dtype) -> None:
    """Raise JobFailed unless both ends have the same numbers at some random places of the parameters."""
    random = Random(0)
    names = random.choices(list(specs.items()), k=_PROBES)
    places = [(name, [random.randrange(extent) for extent in one.shape]) for name, one in names]
    sent = list(zip(*ends.trainers.call_all("probe", places), strict=True))  # by place, then by rank
    for found in ends.generators.call_all("probe", places):
        for (name, at), there, here in zip(places, sent, found, strict=True):
            held = {torch.tensor(value).to(dtype).item() for value in there if value is not None}
            if here is not None and here not in held:
                raise JobFailed(f"bench sync: {name}{at} is {here} at a generator, but {held} at the trainer")


def describe_sync(result: SyncResult) -> str:
    case = result.case
    return "\n".join(
        [
            f"{case.model}, trainer '{case.trainer}' to generator '{case.generator}', {result.device}, {result.transport}",
            f"  end to end  {result.end_to_end_ms:.2f} ms  (median of {case.rounds}; slowest {result.slowest_ms:.2f} ms)",
            f"  publish     {result.publish_ms:.2f} ms",
            f"  load        {result.load_ms:.2f} ms",
            f"  received    {result.bytes / 1e9:.3f} GB, {result.gb_s:.1f} GB/s",
            f"  plain copy  {result.copy_ms:.2f} ms for as many bytes",
        ]
    )
