"""Weights go from any layout to any other through the slots: bit for bit, no byte too many, and never mixed.

All ranks live in this one process: each writes and reads its own slots, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from helpers.layouts import Ends, empty, ends, held, held_by, part, random_tensors, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from llamarl.errors import CorruptWeights, InputError, StaleWeights
from llamarl.families.parameters import parameter_shapes, parameters
from llamarl.layout.boxes import Box, volume
from llamarl.layout.mesh import Mesh
from llamarl.layout.model import SCALE, placement_of, scale_box
from llamarl.model.shards import Shard
from llamarl.model_spec import ModelSpec
from llamarl.weights.memory import copy_tensor
from llamarl.weights.rank_slots import find
from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter
from llamarl.weights.wire import MAX_FP8, WireFormat

HOST = -1


@contextmanager
def slot_file() -> Iterator[SlotFile]:
    file = SlotFile()
    try:
        yield file
    finally:
        file.close()


class Agreement:
    """What ranks of one publication agree on, for ranks that speak one after the other."""

    def __init__(self) -> None:
        self.edition = 1

    def __call__(self, flags: Tensor) -> None:
        if flags.item() > 1:
            flags.fill_(self.edition)


class Trainers:
    def __init__(
        self, file: SlotFile, full: dict[str, Tensor], boxes: Sequence[dict[str, Box]], wire: WireFormat | None = None
    ) -> None:
        self.agreement = Agreement()
        self.holdings = [held(full, rank) for rank in boxes]
        self.writers = [
            SlotWriter(file, holding, lease_s=1, rank=rank, num_ranks=len(boxes), agree=self.agreement, wire=wire)
            for rank, holding in enumerate(self.holdings)
        ]

    def publish(self, version: int, ranks: Sequence[int] | None = None) -> None:
        self.agreement.edition += 1
        for rank in range(len(self.writers)) if ranks is None else ranks:
            self.writers[rank].publish(version)

    def take(self, full: dict[str, Tensor], boxes: Sequence[dict[str, Box]]) -> None:
        for holding, rank in zip(self.holdings, boxes, strict=True):
            for name, box in rank.items():
                holding[name][0].copy_(part(full[name], box))


@settings(deadline=None, max_examples=100)
@given(ends(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_layout_becomes_any_other_bit_for_bit_with_the_fewest_bytes(found: Ends, dtype: torch.dtype) -> None:
    full = random_tensors(found.shapes, dtype=dtype)
    with slot_file() as file:
        Trainers(file, full, found.sources).publish(3)
        for rank in found.targets:
            target = empty(full, rank)
            moved = SlotReader(file, target).load(3)
            assert all(same_bits(target[name][0], part(full[name], box)) for name, box in rank.items())
            assert moved == sum(volume(box) for box in rank.values()) * dtype.itemsize


@settings(deadline=None, max_examples=30)
@given(ends())
def test_no_slot_holds_more_than_its_rank_does(found: Ends) -> None:
    full = random_tensors(found.shapes)
    with slot_file() as file:
        Trainers(file, full, found.sources).publish(0)
        for rank, boxes in enumerate(found.sources):
            own = sum(4 * volume(box) for box in boxes.values())
            assert find(file, rank, HOST).manifest.num_bytes < own + 64 * len(boxes) + 1


@settings(deadline=None, max_examples=30)
@given(ends(), st.randoms(use_true_random=False))
def test_until_the_last_rank_has_published_nobody_sees_the_version(found: Ends, random: object) -> None:
    old, new = random_tensors(found.shapes, seed=1), random_tensors(found.shapes, seed=2)
    with slot_file() as file:
        trainers = Trainers(file, old, found.sources)
        trainers.publish(4)
        trainers.publish(5)
        trainers.take(new, found.sources)
        for rank in range(len(found.sources) - 1):
            trainers.publish(6, ranks=[rank])
            _assert_still_old(file, found, old)
        trainers.publish(6)
        target = empty(new, found.targets[0])
        SlotReader(file, target).load(6)
        assert all(same_bits(target[name][0], part(new[name], box)) for name, box in found.targets[0].items())


def _assert_still_old(file: SlotFile, found: Ends, old: dict[str, Tensor]) -> None:
    target = empty(old, found.targets[0])
    reader = SlotReader(file, target)
    for gone in (4, 6):
        with pytest.raises(StaleWeights):
            reader.load(gone)
    assert all((tensor == 9).all() for tensor, _ in target.values()), "the reader keeps what it had"
    reader.load(5)
    assert all(same_bits(target[name][0], part(old[name], box)) for name, box in found.targets[0].items())


def two_halves() -> tuple[dict[str, Tensor], list[dict[str, Box]]]:
    full = random_tensors({"w": (8, 6)})
    return full, [{"w": ((0, 4), (0, 6))}, {"w": ((4, 8), (0, 6))}]


def test_a_version_that_is_made_again_is_not_mixed_with_its_first_making() -> None:
    """After a trainer's death rank 0 may have published the redone version, and rank 1 not yet."""
    full, boxes = two_halves()
    with slot_file() as file:
        trainers = Trainers(file, full, boxes)
        trainers.publish(2)
        trainers.publish(2, ranks=[0])
        reader = SlotReader(file, empty(full, {"w": ((0, 8), (0, 6))}))
        with pytest.raises(StaleWeights, match="version 2 is being published again"):
            reader.load(2)


def test_a_new_life_of_the_trainer_takes_over_its_slots_and_what_is_in_them() -> None:
    full, boxes = two_halves()
    with slot_file() as file:
        Trainers(file, full, boxes).publish(2)
        again = Trainers(file, full, boxes)
        target = empty(full, {"w": ((2, 8), (1, 3))})
        reader = SlotReader(file, target)
        reader.load(2)
        again.publish(3)
        again.publish(2)
        reader.load(3)
        reader.load(2)
        assert same_bits(target["w"][0], full["w"][2:8, 1:3])


def test_a_trainer_that_comes_back_with_another_layout_is_read_in_the_new_one() -> None:
    full, boxes = two_halves()
    with slot_file() as file:
        Trainers(file, full, boxes).publish(2)
        target = empty(full, {"w": ((0, 8), (0, 6))})
        reader = SlotReader(file, target)
        reader.load(2)
        other = random_tensors({"w": (8, 6)}, seed=5)
        Trainers(file, other, [{"w": ((0, 8), (0, 2))}, {"w": ((0, 8), (2, 6))}]).publish(2)
        reader.load(2)
        assert same_bits(target["w"][0], other["w"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_in_any_rank_is_noticed_by_those_who_read_it(rank: int) -> None:
    full, boxes = two_halves()
    with slot_file() as file:
        Trainers(file, full, boxes).publish(0)
        find(file, rank, HOST).memory.data(0)[40] ^= 4
        target = empty(full, {"w": ((0, 8), (0, 6))})
        with pytest.raises(CorruptWeights, match="version 0 does not match its checksum"):
            SlotReader(file, target).load(0)
        assert (target["w"][0] == 9).all(), "not even the rank that was sound is taken"
        elsewhere = empty(full, boxes[1 - rank])
        SlotReader(file, elsewhere).load(0)


def test_fused_targets_are_filled_through_their_views() -> None:
    full = random_tensors({"q": (4, 3), "k": (2, 3), "v": (2, 3)})
    with slot_file() as file:
        Trainers(file, full, [{name: tuple((0, n) for n in t.shape) for name, t in full.items()}]).publish(0)
        fused = torch.zeros(8, 3)
        address = fused.data_ptr()
        SlotReader(file, {"q": fused[:4], "k": fused[4:6], "v": fused[6:]}).load(0)
        assert same_bits(fused, torch.cat([full["q"], full["k"], full["v"]]))
        assert fused.data_ptr() == address


@settings(deadline=None, max_examples=40)
@given(ends())
def test_fp32_masters_become_bf16_on_the_way(found: Ends) -> None:
    full = random_tensors(found.shapes)
    narrow = {name: tensor.bfloat16() for name, tensor in full.items()}
    with slot_file() as file:
        Trainers(file, full, found.sources, WireFormat("bf16")).publish(1)
        for rank in found.targets:
            target = empty(narrow, rank)
            moved = SlotReader(file, target).load(1)
            assert all(same_bits(target[name][0], part(narrow[name], box)) for name, box in rank.items())
            assert moved == 2 * sum(map(volume, rank.values()))


TINY = ModelSpec(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=64, qk_norm=True, qkv_bias=True,
)  # fmt: skip


MIXTURE = replace(
    TINY, experts=6, experts_per_token=2, expert_size=8, num_kv_heads=4, qkv_bias=False, family="qwen3_moe"
)


@pytest.mark.parametrize(
    "source", [Mesh((("fsdp", 2), ("tp", 2)), 2), Mesh((("tp", 4),), 2), Mesh((("fsdp", 3),))], ids=str
)
@pytest.mark.parametrize("target", [Mesh(), Mesh((("tp", 2),)), Mesh((("tp", 2),), 2), Mesh((("tp", 4),), 2)], ids=str)
def test_experts_arrive_bit_for_bit_whoever_holds_them(source: Mesh, target: Mesh) -> None:
    shapes = parameter_shapes(MIXTURE)
    placed = {name: placement_of(parameter) for name, parameter in parameters(MIXTURE).items()}
    full = random_tensors(shapes)
    with slot_file() as file:
        Trainers(file, full, held_by(source, shapes, placed)).publish(0)
        for boxes in held_by(target, shapes, placed):
            received = {name: Shard(torch.zeros(part(full[name], box).shape), box) for name, box in boxes.items()}
            SlotReader(file, received).load(0)
            for name, box in boxes.items():
                assert same_bits(received[name].tensor, part(full[name], box)), name


def quantized(full: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The plain way: one scale per row and segment of columns, from the whole matrix."""
    parts, scales = [], []
    for segment in torch.split(full, width, dim=1):
        scale = segment.abs().amax(dim=1) * (1 / MAX_FP8)
        parts.append((segment * (1 / scale)[:, None]).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn))
        scales.append(scale)
    return torch.cat([part.view(torch.uint8) for part in parts], 1).view(torch.float8_e4m3fn), torch.stack(scales, 1)


@pytest.mark.parametrize("trainer", [Mesh(), Mesh((("fsdp", 3),)), Mesh((("fsdp", 2), ("tp", 2)))])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fp8_has_one_scale_per_row_of_each_generator_rank(trainer: Mesh, tp: int) -> None:
    shapes = parameter_shapes(TINY)
    placed = {name: placement_of(parameter) for name, parameter in parameters(TINY).items()}
    full, wire = random_tensors(shapes), WireFormat.for_generator("fp8", TINY, tp)
    targets = held_by(Mesh((("tp", tp),)), shapes, placed)
    with slot_file() as file:
        if trainer.size("tp") > tp:
            with pytest.raises(InputError, match="fp8 has one scale per 16 columns of"):
                Trainers(file, full, held_by(trainer, shapes, placed), wire)
            return
        Trainers(file, full, held_by(trainer, shapes, placed), wire).publish(0)
        for boxes in targets:
            target = fp8_target(full, boxes, wire)
            SlotReader(file, target).load(0)
            for name, box in boxes.items():
                if name not in wire.segments:
                    assert same_bits(target[name][0], part(full[name].bfloat16(), box)), name
                    continue
                width = wire.segments[name].width
                weight, scale = quantized(full[name], width)
                assert same_bits(target[name][0], part(weight.view(torch.uint8), box).view(torch.float8_e4m3fn)), name
                assert same_bits(target[name + SCALE][0], part(scale, scale_box(box, width))), name


def fp8_target(full: dict[str, Tensor], boxes: dict[str, Box], wire: WireFormat) -> dict[str, Shard]:
    target: dict[str, Shard] = {}
    for name, box in boxes.items():
        dtype = torch.float8_e4m3fn if name in wire.segments else torch.bfloat16
        target[name] = Shard(torch.zeros(part(full[name], box).shape, dtype=dtype), box)
        if name in wire.segments:
            scales = scale_box(box, wire.segments[name].width)
            target[name + SCALE] = Shard(torch.zeros([end - first for first, end in scales]), scales)
    return target


def test_rows_that_trainers_share_get_the_scale_of_their_largest_value() -> None:
    """Two trainer ranks hold half the columns each, one generator rank all of them."""
    name = "model.layers.0.mlp.down_proj.weight"
    full = random_tensors({name: parameter_shapes(TINY)[name]})
    wire = WireFormat.for_generator("fp8", TINY, tp=1)
    largest = full[name].abs().amax(dim=1)
    shards = [Shard(full[name][:, first : first + 12].clone(), ((0, 16), (first, first + 12))) for first in (0, 12)]
    with slot_file() as file:
        agreement = Agreement()

        def take_largest(maxima: Tensor) -> None:
            maxima.copy_(largest)

        for rank, shard in enumerate(shards):
            writer = SlotWriter(
                file, {name: shard}, lease_s=1, rank=rank, num_ranks=2, agree=agreement,
                wire=wire, combine_max=take_largest,
            )  # fmt: skip
            writer.publish(0)
        target = {name: torch.zeros(16, 24, dtype=torch.float8_e4m3fn), name + SCALE: torch.zeros(16, 1)}
        SlotReader(file, target).load(0)
        weight, scale = quantized(full[name], 24)
        assert same_bits(target[name], weight)
        assert same_bits(target[name + SCALE], scale)


def test_a_row_of_zeros_stays_zeros_and_the_largest_value_fits() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    full = {name: torch.zeros(24, 16)}
    full[name][1, 3] = -1e30
    with slot_file() as file:
        SlotWriter(file, full, lease_s=1, wire=WireFormat.for_generator("fp8", TINY)).publish(0)
        target = {name: torch.ones(24, 16).to(torch.float8_e4m3fn), name + SCALE: torch.zeros(24, 1)}
        SlotReader(file, target).load(0)
    back = target[name].float() * target[name + SCALE]
    assert torch.allclose(back, full[name], rtol=1e-6)
    assert (target[name + SCALE] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("size", [(), (0,), (5,), (300, 211)])
def test_copies_without_torchs_threads_are_torchs_copies(
    dtype: torch.dtype, turned: tuple[bool, bool], size: tuple[int, ...]
) -> None:
    for source_dtype in {dtype, torch.float32}:
        target, expected = torch.zeros(size).to(dtype), torch.zeros(size).to(dtype)
        source = torch.randn(size).to(source_dtype)
        target, expected = (tensor.mT if turned[0] and size[1:] else tensor for tensor in (target, expected))
        source = source.mT if turned[0] and size[1:] else source
        source = source.mT.contiguous().mT if turned[1] and size[1:] else source
        copy_tensor(target, source)
        expected.copy_(source)
        assert same_bits(target, expected)
