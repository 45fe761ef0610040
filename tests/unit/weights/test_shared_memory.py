"""Memory that is filled once, shared by all, outlives its users, and that nobody can write again."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llamarl.weights import fd_mailbox, shared_memory
from llamarl.weights.shared_memory import private_memory
from llamarl.weights.slot_file import SlotFile

CPU = torch.device("cpu")
SIZE = 3 * 4096 + 5


@pytest.fixture
def file() -> Iterator[SlotFile]:
    file = SlotFile()
    yield file
    file.close()


def never(memory: Tensor) -> None:
    raise AssertionError("it is filled already")


def in_child(deed: Callable[[], object]) -> int:
    """Runs a deed in a process of its own; returns its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        try:
            deed()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shared(file: SlotFile, fill: Callable[[Tensor], object], name: str = "base") -> Tensor:
    return shared_memory.shared_memory(file, name, CPU, SIZE, fill)


def test_the_first_fills_it_and_all_see_the_same_pages_also_after_its_death(file: SlotFile) -> None:
    assert in_child(lambda: shared(file, lambda memory: memory.fill_(7))) == 0
    found = shared(file, never)
    assert found.shape == (SIZE,) and bool((found == 7).all())
    inodes = {
        line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if shared_memory.HOST_NAME in line
    }
    again = shared(file, never)
    assert bool((again == 7).all()) and len(inodes) == 1


def test_who_dies_while_filling_leaves_nothing_and_the_next_begins_anew(file: SlotFile) -> None:
    def fill_half(memory: Tensor) -> None:
        memory[:4096].fill_(9)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: shared(file, fill_half)) == -signal.SIGKILL
    assert bool((shared(file, lambda memory: memory.fill_(1)) == 1).all())


def test_a_failure_while_filling_is_told_and_leaves_nothing(file: SlotFile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AssertionError, match="filled already"):
        shared(file, never)
    assert len(os.listdir("/proc/self/fd")) == before
    assert bool((shared(file, lambda memory: memory.fill_(2)) == 2).all())


def test_a_write_ends_the_process_that_tries_it(file: SlotFile) -> None:
    shared(file, lambda memory: memory.fill_(3))
    assert in_child(lambda: shared(file, never).fill_(4)) == -signal.SIGSEGV
    assert in_child(lambda: private_memory(CPU, SIZE, lambda memory: None).add_(1)) == -signal.SIGSEGV
    assert bool((shared(file, never) == 3).all())


def test_nobody_can_map_it_for_writing(file: SlotFile) -> None:
    shared(file, lambda memory: memory.fill_(3))
    fd = fd_mailbox.find(file, shared_memory._number(f"base/{CPU}/{SIZE}"))
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


def test_other_names_are_other_memory(file: SlotFile) -> None:
    assert bool((shared(file, lambda memory: memory.fill_(1), "one") == 1).all())
    assert bool((shared(file, lambda memory: memory.fill_(2), "two") == 2).all())
    assert bool((shared(file, never, "one") == 1).all())
