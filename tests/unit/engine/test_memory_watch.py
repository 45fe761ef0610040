"""The memory that is told is what the process has held, and that of the GPU on which it computes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from llamarl.engine.memory_watch import MemoryWatch
from llamarl.machine import GIB, MemoryPeak
from llamarl.observe.summary import MemoryUsed


def looked(monkeypatch: pytest.MonkeyPatch) -> MemoryPeak:
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    found = MemoryWatch().take()
    assert found is not None
    return found


def test_the_peak_grows_by_what_is_allocated_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = looked(monkeypatch)
    more = np.ones(before.host + (64 << 20), dtype=np.uint8)
    during = looked(monkeypatch)
    assert during.host > before.host + (32 << 20)
    del more
    assert looked(monkeypatch).host >= during.host


def test_a_second_look_at_once_is_left_out() -> None:
    watch = MemoryWatch()
    assert watch.take() is not None
    assert watch.take() is None


def test_the_gpu_is_the_one_that_this_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor on cuda:1 has no set device: asking for the current one would tell of another, and take memory there."""
    asked: list[int] = []

    def mem_get_info(device: int) -> tuple[int, int]:
        asked.append(device)
        return 40, 100

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: (0, 7)[device])
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    found = looked(monkeypatch)
    assert asked == [1]
    assert (found.device, found.gpu_used, found.gpu_total) == (7, 60, 100)


def test_a_gpu_that_was_not_used_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("asked"))
    assert looked(monkeypatch).gpu_total == 0


def test_peaks_merge_number_by_number_but_for_those_of_one_gpu() -> None:
    assert MemoryPeak(5, 2, 9, 10).merged(MemoryPeak(4, 3, 8, 10)) == MemoryPeak(5, 3, 9, 10)
    small, large = MemoryPeak(1, 1, 22, 24), MemoryPeak(1, 1, 30, 80)
    assert small.merged(large) == large.merged(small) == small, "of two GPUs, the fuller one"
    assert MemoryUsed.of({"generator": large, "trainer": small}).gpu_total == 24 / GIB
