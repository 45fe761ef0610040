"""A reader verifies while it copies where it can go back to the version before; damage never becomes its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.slots import bytes_of_slot, held_by_another_process, random_weights, same_bits, writer_of, zeros_like
from torch import Tensor

from llamarl.errors import BrokenWeights, CorruptWeights
from llamarl.weights.memory import HostMemory
from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter


@pytest.fixture
def file() -> Iterator[SlotFile]:
    file = SlotFile()
    yield file
    file.close()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes over a slot's memory that readers make."""
    made: list[str] = []

    def noting(name: str) -> Callable[..., object]:
        original = getattr(HostMemory, name)

        def noted(*args: object) -> object:
            made.append(name)
            return original(*args)

        return noted

    for name in ("read_digested", "digests", "read"):
        monkeypatch.setattr(HostMemory, name, noting(name))
    return made


def loaded_reader(file: SlotFile, weights: dict[str, Tensor]) -> tuple[SlotWriter, SlotReader, dict[str, Tensor]]:
    """A reader that has version 0, and a writer that has published version 1."""
    writer, target = writer_of(file, weights), zeros_like(weights)
    reader = SlotReader(file, target)
    writer.publish(0)
    reader.load(0)
    weights["norm"].fill_(1.0)
    writer.publish(1)
    return writer, reader, target


def test_a_reader_that_can_go_back_verifies_while_it_copies(file: SlotFile, passes: list[str]) -> None:
    weights = random_weights()
    _, reader, target = loaded_reader(file, weights)
    assert passes == ["digests", "read"], "the first weights are verified before anything changes"
    passes.clear()
    reader.load(1)
    assert passes == ["read_digested"]
    assert same_bits(target, weights)


def test_damaged_weights_that_were_taken_are_given_back(file: SlotFile, passes: list[str]) -> None:
    weights = random_weights()
    writer, reader, target = loaded_reader(file, weights)
    before = {name: tensor.clone() for name, tensor in target.items()}
    bytes_of_slot(file, 1)[77] ^= 1
    passes.clear()
    for _ in range(2):
        with pytest.raises(CorruptWeights, match="version 1 does not match its checksum"):
            reader.load(1)
        assert same_bits(target, before)
    assert passes == ["read_digested", "digests", "read"] * 2
    writer.publish(1)
    reader.load(1)
    assert same_bits(target, weights)


def test_where_there_is_no_way_back_weights_are_verified_first(file: SlotFile, passes: list[str]) -> None:
    weights = random_weights()
    writer, reader, target = loaded_reader(file, weights)
    writer.publish(2)
    passes.clear()
    reader.load(1)
    assert passes == ["digests", "read"], "the slot of version 0 holds version 2 by now"
    with held_by_another_process(file, slot=1, exclusive=True):
        passes.clear()
        reader.load(2)
        assert passes == ["digests", "read"], "somebody writes in the slot of version 1"
    assert same_bits(target, weights)


def test_a_reader_that_cannot_go_back_either_says_that_its_weights_are_lost(file: SlotFile) -> None:
    _, reader, _ = loaded_reader(file, random_weights())
    bytes_of_slot(file, 0)[3] ^= 1
    bytes_of_slot(file, 1)[3] ^= 1
    with pytest.raises(
        BrokenWeights, match="version 0 does not match its checksum, nor does the one that was to replace it"
    ):
        reader.load(1)
