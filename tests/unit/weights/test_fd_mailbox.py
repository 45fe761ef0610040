"""Descriptors wait in a socket for whoever needs them, also when their sender is dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.errors import StaleWeights
from llamarl.weights import fd_mailbox
from llamarl.weights.slot_file import SlotFile


@pytest.fixture
def file() -> Iterator[SlotFile]:
    file = SlotFile()
    yield file
    file.close()


def memory_with(text: bytes) -> int:
    fd = os.memfd_create("memory")
    os.write(fd, text)
    return fd


def posted(file: SlotFile, rank: int, memory: int, text: bytes) -> None:
    fd = memory_with(text)
    fd_mailbox.store(file, rank, memory, fd)
    os.close(fd)


def text_of(file: SlotFile, memory: int) -> bytes:
    fd = fd_mailbox.find(file, memory)
    text = os.pread(fd, 100, 0)
    os.close(fd)
    return text


def num_open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_everybody_gets_a_descriptor_as_often_as_wanted(file: SlotFile) -> None:
    posted(file, 0, 11, b"zero")
    posted(file, 1, 22, b"one")
    assert [text_of(file, 11) for _ in range(3)] == [b"zero"] * 3
    assert text_of(file, 22) == b"one"


def test_it_stays_when_its_sender_is_killed(file: SlotFile) -> None:
    pid = os.fork()
    if pid == 0:
        posted(file, 3, 5, b"left behind")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert text_of(file, 5) == b"left behind"


def test_a_rank_that_comes_back_with_other_memory_replaces_its_own_only(file: SlotFile) -> None:
    posted(file, 0, 1, b"old")
    posted(file, 1, 2, b"other")
    posted(file, 0, 3, b"new")
    assert text_of(file, 3) == b"new"
    assert text_of(file, 2) == b"other"
    with pytest.raises(StaleWeights, match="the memory of their slot is gone"):
        fd_mailbox.find(file, 1)


def test_what_was_never_posted_is_gone(file: SlotFile) -> None:
    with pytest.raises(StaleWeights):
        fd_mailbox.find(file, 1)


def test_death_between_the_new_letter_and_the_end_of_the_old_one_heals(
    file: SlotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted(file, 0, 1, b"first")
    with monkeypatch.context() as patch:
        patch.setattr(fd_mailbox, "_first_number", lambda receiver: 1 << 60)  # never takes the old one out
        posted(file, 0, 2, b"second")
    assert text_of(file, 1) == b"first", "the old message is still the one that is seen"
    posted(file, 0, 3, b"third")
    assert text_of(file, 3) == b"third"


def test_no_descriptor_leaks(file: SlotFile) -> None:
    posted(file, 0, 1, b"x")
    before = num_open_fds()
    for number in range(2, 60):
        posted(file, number % 5, number, b"y")
        text_of(file, number)
    assert num_open_fds() == before
