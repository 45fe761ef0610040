"""Weights over a process group, between real processes: bit for bit, and never a mixed model, whoever dies when.

On CPUs over gloo; `tests/gpu` runs this file over NCCL, with all ranks on one GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from helpers.layouts import Ends, empty, ends, held, part, random_tensors
from helpers.ranks import DEVICE
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from llamarl.bench.actors import Actor, Actors
from llamarl.errors import ConfigError
from llamarl.layout.boxes import Box, volume
from llamarl.model.shards import Shard
from llamarl.process_groups import interface_for, let_ranks_share_gpus
from llamarl.weights import group_transport
from llamarl.weights.blocks import DIGEST
from llamarl.weights.buckets import Copies, pack
from llamarl.weights.group import Group
from llamarl.weights.group_transport import GroupReader, GroupWriter

LEASE_S = 10.0
BUCKET = 64  # bytes, so that small parameters make many buckets


class Meeting(NamedTuple):
    """How the ranks of one group find each other, and how many of them read."""

    fd: int
    num_readers: int


def full_at(shapes: dict[str, tuple[int, ...]], version: int) -> dict[str, Tensor]:
    return random_tensors(shapes, seed=version)


class WriterRank:
    """Lives in its own process. `die_after` buckets it kills itself; `flip` damages one byte of that bucket."""

    def __init__(self, groups: Sequence[Meeting], rank: int, found: Ends, lease_s: float = LEASE_S) -> None:
        self._groups, self._found, self._rank, self._sent = groups, found, rank, 0
        self.die_after = self.flip = self.pause_after = -1
        let_ranks_share_gpus()
        self._held = held(full_at(found.shapes, 0), found.sources[rank], DEVICE)
        self._edition = 0
        self._writer = GroupWriter(self._held, lease_s=lease_s, agree=self._agree, bucket_bytes=BUCKET)
        setattr(group_transport, "pack", self._pack)  # noqa: B010

    def serve(self) -> None:
        for fd, num_readers in self._groups:
            group = Group.on_this_host(fd, self._rank, len(self._found.sources), num_readers, DEVICE)
            self._writer.serve(group)

    def _agree(self, flags: Tensor) -> None:
        if flags.item() > 1:
            flags.fill_(self._edition)

    def _pack(self, copies: Copies, message: Tensor) -> None:
        if self._sent == self.die_after:
            time.sleep(0.05)  # so that the buckets before are on their way
            os.kill(os.getpid(), signal.SIGKILL)
        if self._sent == self.pause_after:
            time.sleep(1)
        pack(copies, message)
        if self._sent == self.flip:
            message[-1] ^= 1
        self._sent += 1

    def trouble(self, what: str, bucket: int) -> None:
        setattr(self, what, bucket)
        self._sent = 0

    def num_sent(self) -> int:
        return self._sent

    def publish(self, version: int) -> bool:
        for name, box in self._found.sources[self._rank].items():
            self._held[name][0].copy_(part(full_at(self._found.shapes, version)[name], box))
        self._edition = version + 100
        return self._writer.publish(version).changed

    def publish_alone(self, version: int, edition: int) -> None:
        self._edition = edition
        self._writer.publish(version)


class ReaderRank:
    def __init__(self, group: Meeting, index: int, found: Ends) -> None:
        self._group, self._index, self._found = group, index, found
        let_ranks_share_gpus()
        self._target = empty(full_at(found.shapes, 0), found.targets[index], DEVICE)

    def serve(self) -> None:
        sizes = len(self._found.sources), self._group.num_readers
        group = Group.on_this_host(self._group.fd, sizes[0] + self._index % sizes[1], *sizes, DEVICE)
        self._reader = GroupReader(group, self._target, deadline_s=LEASE_S, bucket_bytes=BUCKET)

    def load(self, version: int) -> int:
        return self._reader.load(version)

    def room(self) -> int:
        """Bytes that it keeps aside until they are all sound."""
        return sum(message.numel() - DIGEST for one in self._reader._incoming for message in one.messages)

    def holds(self, version: int) -> bool:
        full = full_at(self._found.shapes, version)
        boxes = self._found.targets[self._index]
        return all(torch.equal(self._target[name][0].cpu(), part(full[name], box)) for name, box in boxes.items())


@contextmanager
def processes(found: Ends, lease_s: float = LEASE_S, *, apart: bool = False) -> Iterator[tuple[Actors, Actors]]:
    """Writers and readers in one group; or each reader in a group of its own, as generators are."""
    num_readers = len(found.targets)
    groups = [
        Meeting(os.memfd_create("rendezvous"), 1 if apart else num_readers) for _ in range(num_readers if apart else 1)
    ]
    with Actors() as writers, Actors() as readers:
        for rank in range(len(found.sources)):
            writers.append(Actor(lambda rank=rank: WriterRank(groups, rank, found, lease_s)))  # type: ignore[misc]
        for index in range(num_readers):
            readers.append(Actor(lambda index=index: ReaderRank(groups[index % len(groups)], index, found)))  # type: ignore[misc]
        Actors.call_all(Actors([*writers, *readers]), "serve")
        yield writers, readers
    for group in groups:
        os.close(group.fd)


def rows(first: int, end: int) -> dict[str, Box]:
    return {"a": ((first, end), (0, 5)), "b": ((first, end), (0, 7))}


def two_to(num_readers: int) -> Ends:
    """Two trainer ranks with half the rows each; every generator rank wants rows of both."""
    shapes: dict[str, tuple[int, ...]] = {"a": (8, 5), "b": (8, 7)}
    return Ends(shapes, [rows(0, 4), rows(4, 8)], [rows(1, 8) for _ in range(num_readers)])


@settings(deadline=None, max_examples=6 if DEVICE.type == "cpu" else 2, suppress_health_check=[HealthCheck.too_slow])
@given(ends(max_ranks=4, max_size=24))
def test_any_layout_becomes_any_other_bit_for_bit_between_processes(found: Ends) -> None:
    with processes(found) as (writers, readers):
        for version in (0, 1, 2):
            assert all(writers.call_all("publish", version))
            moved = readers.call_all("load", version)
            assert moved == [4 * sum(map(volume, boxes.values())) for boxes in found.targets]
            assert all(readers.call_all("holds", version))
        assert readers.call_all("room") == moved, "nobody holds more than its own part, twice"


def test_versions_that_are_not_there_are_stale_and_the_connection_goes_on() -> None:
    with processes(two_to(1)) as (writers, readers):
        for version in (0, 1, 2):
            writers.call_all("publish", version)
        readers.call_all("load", 1)
        for gone in (0, 3, 17):
            with pytest.raises(RuntimeError, match=f"StaleWeights: weights: version {gone} is not in its slot"):
                readers.call_all("load", gone)
        assert readers.call_all("holds", 1) == [True]
        readers.call_all("load", 2)
        assert readers.call_all("holds", 2) == [True]


def test_a_version_that_one_rank_publishes_again_is_not_mixed_with_its_first_making() -> None:
    with processes(two_to(1)) as (writers, readers):
        writers.call_all("publish", 4)
        writers[0].call("publish_alone", 4, 999)
        with pytest.raises(RuntimeError, match="StaleWeights: weights: version 4 is being published again"):
            readers.call_all("load", 4)


def num_buckets() -> int:
    with processes(two_to(1)) as (writers, readers):
        writers.call_all("publish", 0)
        readers.call_all("load", 0)
        count: int = writers[1].call("num_sent")
    return count


def test_a_writer_that_dies_after_any_bucket_is_named_and_the_old_version_stays_served() -> None:
    count = num_buckets()
    assert count >= 4
    for bucket in range(count):
        with processes(two_to(1)) as (writers, readers):
            writers.call_all("publish", 0)
            readers.call_all("load", 0)
            writers.call_all("publish", 1)
            writers[1].call("trouble", "die_after", bucket)
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=r"LostWeights: .*version 1 cannot be had: trainer rank 1 was lost"
                ):
                    readers.call_all("load", 1)
                assert readers.call_all("holds", 0) == [True]
            assert writers[0].call("publish", 2), "the rank that lives is not held up"
            assert writers[0].call("publish", 3)


def test_a_byte_that_is_flipped_on_the_way_is_noticed_in_any_bucket() -> None:
    with processes(two_to(1)) as (writers, readers):
        writers.call_all("publish", 0)
        readers.call_all("load", 0)
        writers.call_all("publish", 1)
        for bucket in range(writers[1].call("num_sent")):
            writers[1].call("trouble", "flip", bucket)
            with pytest.raises(RuntimeError, match="CorruptWeights: weights: version 1 does not match its checksum"):
                readers.call_all("load", 1)
            assert readers.call_all("holds", 0) == [True]
        writers[1].call("trouble", "flip", -1)
        readers.call_all("load", 1)
        assert readers.call_all("holds", 1) == [True]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("bucket", [0, 1, 3])
def test_a_reader_that_is_killed_holds_up_neither_the_writers_nor_the_other_readers(bucket: int, apart: bool) -> None:
    """Whether readers have groups of their own, as generators have, or share one, as the ranks of a generator do."""
    if DEVICE.type == "cuda" and not apart:
        pytest.skip("over NCCL a reader in the same group waits until its deadline; ranks of a generator die together")
    with processes(two_to(2), apart=apart) as (writers, readers):
        writers.call_all("publish", 0)
        writers.call_all("trouble", "pause_after", bucket)
        readers[0].begin("load", 0)
        time.sleep(0.3)
        readers[0].signal(signal.SIGKILL)
        writers.call_all("trouble", "pause_after", -1)
        readers[1].call("load", 0)
        for version in (1, 2):
            writers.call_all("publish", version)
            readers[1].call("load", version)
            assert readers[1].call("holds", version)


def test_a_reader_that_stops_loses_its_lease_in_time_and_never_holds_a_mixture() -> None:
    lease_s = 0.5 if DEVICE.type == "cpu" else 4.0  # NCCL takes a second or more to give up a connection
    with processes(two_to(1), lease_s) as (writers, readers):
        writers.call_all("publish", 0)
        writers.call_all("trouble", "pause_after", 1)
        readers[0].begin("load", 0)
        time.sleep(0.2)
        readers[0].signal(signal.SIGSTOP)
        started_s = time.monotonic()
        writers.call_all("publish", 2)
        assert time.monotonic() - started_s < 3 + 2 * lease_s
        readers[0].signal(signal.SIGCONT)
        try:
            readers[0].end()
        except RuntimeError as error:
            assert "LostWeights" in str(error) or "StaleWeights" in str(error)
        else:
            assert readers[0].call("holds", 0), "what it was sent before the lease ended is whole"


def test_a_reader_of_other_types_is_told_at_the_meeting() -> None:
    found = two_to(1)

    class Narrow(ReaderRank):
        def serve(self) -> None:
            self._target = {name: Shard(tensor.half(), box) for name, (tensor, box) in self._target.items()}
            super().serve()

    group = Meeting(os.memfd_create("rendezvous"), 1)
    with Actors() as actors:
        actors.extend(Actor(lambda rank=rank: WriterRank([group], rank, found)) for rank in range(2))  # type: ignore[misc]
        reader = Actor(lambda: Narrow(group, 0, found))
        for actor in (*actors, reader):
            actor.begin("serve")
        with pytest.raises(
            RuntimeError, match=r"InputError: weights: 'a' travels as torch.float32, but the reader holds"
        ):
            reader.end()
        reader.close()


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a", "b"]])
def test_beyond_one_host_a_trusted_network_must_be_named(hosts: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match=r"engine.trusted_network: weights would go from a to b"):
        interface_for(hosts, "")
    assert interface_for(hosts, "ib0") == "ib0"
    assert interface_for(["a", "a"], "") == "lo"
