"""Slots of trainers and generators with several ranks, each in its process: whoever dies when, no reader holds a mixture."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest
import torch
from helpers.layouts import part, random_tensors
from torch import Tensor

from llamarl.bench.actors import Actor, Actors
from llamarl.layout.boxes import Box
from llamarl.model.shards import Shard
from llamarl.weights import blocks
from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter

SHAPES: dict[str, tuple[int, ...]] = {"a": (1024, 700), "b": (512, 300), "norm": (33,)}
NUM_BLOCKS = 2  # of each trainer rank
TRAINERS: list[dict[str, Box]] = [
    {"a": ((0, 512), (0, 700)), "b": ((0, 512), (0, 150)), "norm": ((0, 20),)},
    {"a": ((512, 1024), (0, 700)), "b": ((0, 512), (150, 300)), "norm": ((20, 33),)},
]
GENERATORS: list[dict[str, Box]] = [
    {"a": ((0, 1024), (0, 350)), "b": ((0, 256), (0, 300)), "norm": ((0, 33),)},
    {"a": ((0, 1024), (350, 700)), "b": ((256, 512), (0, 300)), "norm": ((0, 33),)},
]


class Writer:
    """`agree` is left to the test: each call is told the edition that all ranks write."""

    def __init__(self, file: SlotFile, rank: int) -> None:
        self._rank, self._edition = rank, 0
        full = random_tensors(SHAPES)
        self._held = {name: Shard(part(full[name], box).clone(), box) for name, box in TRAINERS[rank].items()}
        self._writer = SlotWriter(file, self._held, lease_s=20, rank=rank, num_ranks=2, agree=self._agree)

    def _agree(self, flags: Tensor) -> None:
        if flags.item() > 1:
            flags.fill_(self._edition)

    def publish(self, version: int, edition: int, die_after: int = -1) -> bool:
        if die_after >= 0:
            _die_after(die_after)
        full, self._edition = random_tensors(SHAPES, seed=version), edition
        for name, (tensor, _) in self._held.items():
            tensor.copy_(part(full[name], TRAINERS[self._rank][name]))
        return self._writer.publish(version).changed


def _die_after(num_blocks: int) -> None:
    """Kill this process when so many blocks of a publication are written."""
    left, original = [num_blocks], blocks.digest

    def counting(block: blocks.Bytes) -> bytes:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return original(block)

    setattr(blocks, "digest", counting)  # noqa: B010


class Reader:
    def __init__(self, file: SlotFile, index: int) -> None:
        self._index, self._file = index, file
        shapes = {name: [end - first for first, end in box] for name, box in GENERATORS[index].items()}
        self._target = {name: torch.full(size, 9.0) for name, size in shapes.items()}
        self._reader = SlotReader(
            file, {name: Shard(tensor, GENERATORS[index][name]) for name, tensor in self._target.items()}
        )

    def load(self, version: int) -> int:
        return self._reader.load(version)

    def load_and_die(self, version: int) -> None:
        threading.Timer(0.002, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        while True:
            self._reader.load(version)

    def holds(self, version: int) -> bool:
        full = random_tensors(SHAPES, seed=version)
        return all(
            torch.equal(self._target[name], part(full[name], box)) for name, box in GENERATORS[self._index].items()
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_that_dies_after_any_block_leaves_the_old_version(rank: int) -> None:
    file = SlotFile()
    with Actors() as readers:
        readers.extend(Actor(lambda index=index: Reader(file, index)) for index in range(2))  # type: ignore[misc]
        for block in range(NUM_BLOCKS):
            with Actors() as writers:
                writers.extend(Actor(lambda one=one: Writer(file, one)) for one in range(2))  # type: ignore[misc]
                for version in (2, 3):
                    writers.call_all("publish", version, 10 + 10 * block + version)
                    readers.call_all("load", version)
                for one, writer in enumerate(writers):
                    writer.begin("publish", 4, 10 * block + 19, block if one == rank else -1)
                writers[1 - rank].end()
                with pytest.raises(ConnectionError):
                    writers[rank].end()
            for gone in (2, 4):
                with pytest.raises(RuntimeError, match=f"StaleWeights: weights: version {gone} is not in its slot"):
                    readers.call_all("load", gone)
                with suppress(RuntimeError):
                    readers[1].end()
            assert readers.call_all("holds", 3) == [True, True]
            readers.call_all("load", 3)
            assert readers.call_all("holds", 3) == [True, True]


def test_a_reader_that_dies_in_the_middle_of_a_load_holds_up_nobody() -> None:
    file = SlotFile()
    with Actors() as writers, Actors() as readers:
        writers.extend(Actor(lambda rank=rank: Writer(file, rank)) for rank in range(2))  # type: ignore[misc]
        readers.extend(Actor(lambda index=index: Reader(file, index)) for index in range(2))  # type: ignore[misc]
        writers.call_all("publish", 0, 7)
        readers[0].begin("load_and_die", 0)
        with pytest.raises(ConnectionError):
            readers[0].end()
        for version in (1, 2, 3):
            writers.call_all("publish", version, 7 + version)
            readers[1].call("load", version)
            assert readers[1].call("holds", version)
