"""A publication is read whole and bit for bit, or not at all; a slot that somebody reads is never overwritten."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from helpers.slots import (
    LEASE_S,
    bytes_of_slot,
    held_by_another_process,
    num_bytes_of,
    random_weights,
    same_bits,
    slot_shards_of,
    writer_of,
    zeros_like,
)
from torch import Tensor

from llamarl.errors import CorruptWeights, LeaseTimeout, StaleWeights
from llamarl.weights.memory import HostMemory
from llamarl.weights.slot_file import NUM_SLOTS, SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter
from llamarl.weights.wire import Staging


@pytest.fixture
def file() -> Iterator[SlotFile]:
    file = SlotFile()
    yield file
    file.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_published_is_loaded_bit_for_bit(file: SlotFile, dtype: torch.dtype) -> None:
    weights = random_weights(dtype=dtype)
    target = zeros_like(weights)
    publication = writer_of(file, weights).publish(3)
    num_bytes = SlotReader(file, target).load(3)
    assert same_bits(target, weights)
    assert num_bytes == num_bytes_of(weights) <= publication.num_bytes < num_bytes + 64 * len(weights)


def test_odd_numbers_and_odd_memory_survive(file: SlotFile) -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, -1e38])
    payload = torch.tensor([0x7FC0_1234, 0x7F80_0001], dtype=torch.int32).view(torch.float32)  # NaNs that carry bits
    weights = {
        "odd": odd,
        "payload": payload,
        "turned": torch.arange(12.0).view(3, 4).T,
        "cut": torch.arange(20.0)[3::2],
    }
    target = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
    writer_of(file, weights).publish(0)
    SlotReader(file, target).load(0)
    assert same_bits(target, weights)


def test_mixed_precisions_lie_side_by_side(file: SlotFile) -> None:
    weights = {**random_weights(), "narrow": torch.randn(7).bfloat16(), "wide": torch.randn(9)}
    target = zeros_like(weights)
    writer_of(file, weights).publish(1)
    SlotReader(file, target).load(1)
    assert same_bits(target, weights)


def test_a_publication_is_a_copy_that_the_optimizer_cannot_change(file: SlotFile) -> None:
    weights = random_weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    writer_of(file, weights).publish(0)
    for tensor in weights.values():
        tensor.add_(1.0)
    target = zeros_like(weights)
    SlotReader(file, target).load(0)
    assert same_bits(target, before)


def test_the_previous_version_stays_loadable_and_the_one_before_is_stale(file: SlotFile) -> None:
    weights = random_weights()
    writer, target = writer_of(file, weights), zeros_like(weights)
    reader = SlotReader(file, target)
    for version in range(4):
        weights["norm"].fill_(version)
        writer.publish(version)
        reader.load(version)
        assert (target["norm"] == version).all()
    reader.load(2)
    assert (target["norm"] == 2).all()
    with pytest.raises(StaleWeights, match="version 1 is not in its slot"):
        reader.load(1)
    assert (target["norm"] == 2).all(), "the reader keeps what it had"


@pytest.mark.parametrize("version", [0, 1, 2, 7])
def test_what_was_never_published_is_stale(file: SlotFile, version: int) -> None:
    weights = random_weights()
    reader = SlotReader(file, zeros_like(weights))
    with pytest.raises(StaleWeights):
        reader.load(version)
    writer_of(file, weights).publish(5)
    with pytest.raises(StaleWeights):
        reader.load(version)


@pytest.mark.parametrize("where", ["first", "middle", "last", "single number"])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_noticed_and_the_reader_keeps_its_weights(file: SlotFile, where: str, bit: int) -> None:
    weights = random_weights()
    writer_of(file, weights).publish(0)
    shards, data = slot_shards_of(file), bytes_of_slot(file, 0)
    offset = {
        "first": 0,
        "middle": len(data) // 2,
        "last": shards["big"].offset + weights["big"].numel() * 4 - 1,
        "single number": shards["scale"].offset,
    }[where]
    data[offset] ^= 1 << bit
    kept = random_weights(seed=1)
    target = {name: tensor.clone() for name, tensor in kept.items()}
    with pytest.raises(CorruptWeights, match="version 0 does not match its checksum"):
        SlotReader(file, target).load(0)
    assert same_bits(target, kept)


def test_a_flipped_bit_in_any_piece_is_noticed(file: SlotFile) -> None:
    weights = random_weights()
    writer_of(file, weights).publish(0)
    data, reader = bytes_of_slot(file, 0), SlotReader(file, zeros_like(weights))
    for offset in range(0, len(data), 9973):
        data[offset] ^= 0x10
        with pytest.raises(CorruptWeights):
            reader.load(0)
        data[offset] ^= 0x10
    reader.load(0)


def test_half_of_another_version_is_noticed(file: SlotFile) -> None:
    weights, other = random_weights(0), random_weights(1)
    writer_of(file, other).publish(1)
    half = num_bytes_of(weights) // 2
    mixed = bytes_of_slot(file, 1)[:half].clone()
    writer_of(file, weights).publish(0)
    bytes_of_slot(file, 0)[:half] = mixed
    with pytest.raises(CorruptWeights):
        SlotReader(file, zeros_like(weights)).load(0)


def test_a_reader_of_another_layout_is_told_and_changes_nothing(file: SlotFile) -> None:
    writer_of(file, random_weights()).publish(0)
    others: dict[str, dict[str, Tensor]] = {
        "'big' was published, but is not among": {"norm": torch.ones(5)},
        "'more' was not published": {**random_weights(), "more": torch.ones(1)},
        r"'norm' is \[5\] where published, and \[4\] at": {**random_weights(), "norm": torch.ones(4)},
        "cannot become torch.float8_e4m3fn without its scales": {
            **random_weights(),
            "norm": torch.ones(5, dtype=torch.float8_e4m3fn),
        },
    }
    for complaint, target in others.items():
        before = {name: tensor.clone() for name, tensor in target.items()}
        reader = SlotReader(file, target)
        for _ in range(2):
            with pytest.raises(CorruptWeights, match=complaint):
                reader.load(0)
        assert same_bits(target, before)


def test_rows_that_change_places_are_noticed(file: SlotFile) -> None:
    weights = {"matrix": torch.randn(64, 2048)}
    writer_of(file, weights).publish(0)
    rows = bytes_of_slot(file, 0).view(64, 8192)
    for other in (1, 2, 3, 32):
        rows[[0, other]] = rows[[other, 0]]
        with pytest.raises(CorruptWeights, match="does not match its checksum"):
            SlotReader(file, zeros_like(weights)).load(0)
        rows[[0, other]] = rows[[other, 0]]
    SlotReader(file, zeros_like(weights)).load(0)


def test_publishing_the_same_bytes_again_changes_nothing(file: SlotFile) -> None:
    weights = random_weights()
    writer = writer_of(file, weights)
    first, again = writer.publish(2), writer.publish(2)
    assert (first.changed, again.changed) == (True, False)
    assert first.checksum == again.checksum
    weights["big"][1, 2, 3] += 1
    redone = writer.publish(2)
    assert redone.changed
    assert redone.checksum != first.checksum
    assert writer.publish(4).changed, "another version is news even with the same bytes"


def test_another_writer_with_the_same_weights_gets_the_same_checksum(file: SlotFile) -> None:
    """A trainer that died comes back as another process: what it redoes must be recognized."""
    first = writer_of(file, random_weights()).publish(0)
    again = writer_of(SlotFile([os.dup(fd) for fd in file.fds]), random_weights()).publish(0)
    assert not again.changed
    assert again.checksum == first.checksum
    elsewhere = SlotFile()
    assert writer_of(elsewhere, random_weights()).publish(1).checksum == first.checksum
    elsewhere.close()


def test_a_live_lease_is_never_overwritten_and_its_holder_is_named(file: SlotFile) -> None:
    weights = random_weights()
    writer_of(file, weights).publish(0)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    stuck: list[int] = []
    writer = SlotWriter(file, weights, lease_s=LEASE_S, on_stuck=stuck.append)
    with held_by_another_process(file, slot=0) as holder:
        weights["norm"].fill_(7.0)
        with pytest.raises(LeaseTimeout, match=f"process {holder.pid} keeps its lease on weight slot 0"):
            writer.publish(2)
        assert set(stuck) == {holder.pid}
        target = zeros_like(weights)
        SlotReader(file, target).load(0)
        assert same_bits(target, before), "the slot was touched while somebody read it"


def test_a_lease_on_one_slot_does_not_hold_up_the_other(file: SlotFile) -> None:
    weights = random_weights()
    writer = writer_of(file, weights)
    with held_by_another_process(file, slot=0):
        assert writer.publish(1).version == 1


def test_the_writer_waits_as_long_as_a_lease_may_last(file: SlotFile) -> None:
    writer = writer_of(file, random_weights(), lease_s=30.0)
    with held_by_another_process(file, slot=0) as holder:
        holder.send_signal(signal.SIGKILL)
        started_s = time.monotonic()
        assert writer.publish(0).version == 0
        assert time.monotonic() - started_s < 10.0, "the death of the holder did not free the slot"


def test_a_reader_that_is_killed_for_its_lease_frees_the_slot(file: SlotFile) -> None:
    """What the engine does when it hears of a stuck reader."""
    weights = random_weights()
    writer = SlotWriter(file, weights, lease_s=LEASE_S, on_stuck=lambda pid: os.kill(pid, signal.SIGKILL))
    with held_by_another_process(file, slot=0):
        writer.publish(0)
    target = zeros_like(weights)
    SlotReader(file, target).load(0)
    assert same_bits(target, weights)


def in_a_child(action: object) -> int:
    """Run in a forked process, which has the slots' descriptor, as the executors have; returns its exit status."""
    assert callable(action)
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_death_in_the_middle_of_a_publication_leaves_the_old_version_and_no_new_one(
    file: SlotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights()
    writer = writer_of(file, weights)
    for version in (2, 3):
        weights["norm"].fill_(version)
        writer.publish(version)

    def half_and_die(self: HostMemory, slot: int, staging: Staging) -> bytes:
        data = self.data(slot)
        data[: len(data) // 2] = 255
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    monkeypatch.setattr(HostMemory, "write", half_and_die)
    assert os.WTERMSIG(in_a_child(lambda: writer.publish(4))) == signal.SIGKILL
    monkeypatch.undo()
    target = zeros_like(weights)
    reader = SlotReader(file, target)
    reader.load(3)
    assert (target["norm"] == 3).all()
    for version in (2, 4):
        with pytest.raises(StaleWeights):
            reader.load(version)
    assert writer.publish(4).changed, "the next trainer can publish it"
    reader.load(4)
    assert same_bits(target, weights)


def test_a_reader_sees_whole_versions_only_while_another_process_publishes(file: SlotFile) -> None:
    last = 150

    def publish_many() -> None:
        weights = {name: torch.zeros(50_000) for name in "abc"}
        writer = writer_of(file, weights, lease_s=30.0)
        for version in range(last + 1):
            for tensor in weights.values():
                tensor.fill_(version)
            writer.publish(version)

    pid = os.fork()
    if pid == 0:
        try:
            publish_many()
            os._exit(0)
        except BaseException:
            os._exit(1)
    target = {name: torch.zeros(50_000) for name in "abc"}
    reader, seen = SlotReader(file, target), set()
    deadline_s = time.monotonic() + 60
    while last not in seen and time.monotonic() < deadline_s:
        version = max(0, *(file.read_header(slot).version for slot in range(NUM_SLOTS)))
        try:
            reader.load(version)
        except StaleWeights:
            continue
        seen.add(version)
        assert all((tensor == version).all() for tensor in target.values())
    assert os.waitpid(pid, 0)[1] == 0
    assert last in seen
