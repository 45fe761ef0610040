"""Publication beside other work: reported when it is done, and never of weights that have changed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from llamarl.errors import LeaseTimeout
from llamarl.weights.overlapped_writer import OverlappedWriter
from llamarl.weights.slot_file import SlotFile
from llamarl.weights.slots import SlotReader, SlotWriter
from llamarl.weights.transport import Publication


@pytest.fixture
def file() -> Iterator[SlotFile]:
    file = SlotFile()
    yield file
    file.close()


def fail(error: Exception) -> None:
    raise AssertionError(error)


class SlowWriter:
    """Publishes when it is let go."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer, self.let_go = writer, threading.Event()

    def publish(self, version: int) -> Publication:
        assert self.let_go.wait(10)
        return self._writer.publish(version)


def test_the_step_waits_for_the_copy_and_the_copy_for_nobody(file: SlotFile) -> None:
    weights = {"w": torch.zeros(1000)}
    slow, told = SlowWriter(SlotWriter(file, weights, lease_s=1)), list[Publication]()
    writer = OverlappedWriter(slow)
    writer.begin(1, told.append, fail)
    assert not told, "the trainer goes on at once"
    threading.Timer(0.1, slow.let_go.set).start()
    assert writer.hold() > 0.05, "the optimizer's step waits for what is being read"
    weights["w"].fill_(7.0)
    assert [publication.version for publication in told] == [1]
    target = {"w": torch.ones(1000)}
    SlotReader(file, target).load(1)
    assert not target["w"].count_nonzero()


def test_a_step_with_nothing_under_way_does_not_wait(file: SlotFile) -> None:
    writer = OverlappedWriter(SlotWriter(file, {"w": torch.zeros(3)}, lease_s=1))
    assert writer.hold() == 0.0
    writer.begin(0, lambda publication: None, fail)
    writer.begin(1, lambda publication: None, fail)
    writer.hold()
    assert writer.hold() == 0.0
    assert file.read_header(0).version == 0
    assert file.read_header(1).version == 1


def test_a_publication_that_fails_is_told_at_once_and_at_the_next_step() -> None:
    class Failing:
        def publish(self, version: int) -> Publication:
            raise LeaseTimeout("process 7 keeps its lease")

    writer, told = OverlappedWriter(Failing()), list[Exception]()
    writer.begin(0, lambda publication: None, told.append)
    with pytest.raises(LeaseTimeout, match="process 7"):
        writer.hold()
    assert [str(error) for error in told] == ["process 7 keeps its lease"]
