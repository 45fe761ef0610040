"""Weights large enough for several threads: they arrive whole, and not a single bit may differ."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor

from llamarl.errors import CorruptWeights
from llamarl.weights.rank_slots import find
from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter

BLOCK = 1 << 20


def large_weights() -> dict[str, Tensor]:
    """40 MB in odd sizes and types: across blocks, inside one, smaller than a cache line, and not in order in memory."""
    torch.manual_seed(0)
    return {
        "large": torch.randn(5_000_003),
        "half": torch.randn(3001, 1003).to(torch.bfloat16),
        "turned": torch.randn(1000, 2003).t(),
        "small": torch.randn(7),
        "none": torch.randn(0),
        "last": torch.randn(1_500_000),
    }


@pytest.fixture
def file() -> Iterator[SlotFile]:
    file = SlotFile()
    yield file
    file.close()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_parameter_arrives_bit_for_bit(file: SlotFile, threads: int) -> None:
    written = large_weights()
    read = {name: torch.zeros_like(parameter) for name, parameter in written.items()}
    SlotWriter(file, written, lease_s=1).publish(1)
    SlotReader(file, read).load(1)
    for name, parameter in written.items():
        assert torch.equal(read[name], parameter), name


def test_the_checksum_does_not_depend_on_the_number_of_threads(file: SlotFile) -> None:
    writer, before = SlotWriter(file, large_weights(), lease_s=1), torch.get_num_threads()
    checksums = set()
    for version, threads in enumerate((1, 2, 5)):
        torch.set_num_threads(threads)
        checksums.add(writer.publish(version).checksum)
    torch.set_num_threads(before)
    assert len(checksums) == 1


def test_one_flipped_bit_anywhere_is_noticed_and_the_reader_keeps_what_it_had(file: SlotFile, threads: int) -> None:
    written = large_weights()
    read = {name: torch.zeros_like(parameter) for name, parameter in written.items()}
    SlotWriter(file, written, lease_s=1).publish(0)
    reader, random = SlotReader(file, read), Random(threads)
    data = find(file, rank=0, device=-1).memory.data(0)
    borders = [0, BLOCK - 1, BLOCK, 31 * BLOCK - 1, len(data) - 1]
    for at in [*borders, *(random.randrange(len(data)) for _ in range(10))]:
        bit = 1 << random.randrange(8)
        data[at] ^= bit
        with pytest.raises(CorruptWeights):
            reader.load(0)
        data[at] ^= bit
    assert all(not parameter.count_nonzero() for parameter in read.values())
    reader.load(0)
    assert torch.equal(read["last"], written["last"])
