"""A generator that notes where its time goes: what its host does, and what the GPU does by its own clock. It appends a row
of sums to the file that WATCH_FILE names, every few bursts; `shares` compares two of them. Once, some hundred bursts after
the start, it also writes which kernels ran during a few bursts, to the file beside it (`KERNELS`)."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from llamarl.bench.machine import KernelTimes
from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.executors.executor import Executor
from llamarl.messages import LoadWeights, Message, Report

WATCH_FILE = "LLAMARL_WATCH_FILE"
KERNELS = ".kernels"  # behind the name of that file
_EVERY = 10  # bursts
_PROFILED = range(400, 416)


class Watched:
    """Around the generator and, inside it, the steps of its decoder."""

    def __init__(self, honest: Any, file: Path) -> None:
        self._honest, self._file = honest, file
        self._sums: dict[str, float] = defaultdict(float)
        self._kernels = KernelTimes()
        self._begun: deque[tuple[str, Any, Any]] = deque()  # on the GPU, in order
        decoder, device = honest._decoder, honest._decoder._device
        self._decoder, self._on_gpu = decoder, device._on_gpu
        graphs, schedule = device._graphs, decoder._schedule
        device.launch, device.fill = self._on_device("decode", device.launch), self._on_device("prefill", device.fill)
        for owner, *names in (
            (decoder, "_admit", "_make_room", "_launch", "_collect"),
            (device, "fill", "copy_pages", "open", "launch", "read"),
            (schedule, "admit"),
            (graphs, "_capture"),
        ):
            for name in names:
                setattr(owner, name, self._on_host(f"{type(owner).__name__}.{name}", getattr(owner, name)))

    @property
    def idle(self) -> bool:
        return bool(self._honest.idle)

    def handle(self, message: Message) -> Iterable[Report]:
        name = "load" if isinstance(message, LoadWeights) else "take"
        reports: list[Report] = self._on_host(name, lambda: list(self._honest.handle(message)))()
        return reports

    def work(self) -> Iterable[Report]:
        reports: list[Report] = self._on_host("step", lambda: list(self._honest.work()))()
        self._sums["bursts"] += 1
        if self._sums["bursts"] == _PROFILED.start:
            self._kernels.start()
        elif self._sums["bursts"] == _PROFILED.stop:
            self._kernels.stop()
            self._file.with_name(self._file.name + KERNELS).write_text(self._kernels.table())
        self._sums["rows"] += len(self._decoder._schedule.running)
        if self._sums["bursts"] % _EVERY == 0:
            self._add_up()
            with self._file.open("a") as out:
                out.write(json.dumps([time.time(), self._sums]) + "\n")
        return reports

    def _on_host(self, name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return action(*arguments, **options)
            finally:
                self._sums[f"host {name}"] += time.perf_counter() - start_s
                self._sums[f"times {name}"] += 1

        return timed

    def _on_device(self, name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def timed(first: Any, *arguments: Any, **options: Any) -> Any:
            if not self._on_gpu or not first:
                return action(first, *arguments, **options)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            found = action(first, *arguments, **options)
            end.record()
            self._begun.append((name, begin, end))
            return found

        return timed

    def _add_up(self) -> None:
        while self._begun and self._begun[0][2].query():
            name, begin, end = self._begun.popleft()
            self._sums[f"gpu {name}"] += begin.elapsed_time(end) / 1e3
            self._sums[f"times {name}"] += 1


def watched_generator(site: BuildContext) -> Executor:
    return Watched(build_generator(site), Path(os.environ[WATCH_FILE]))


def shares(file: Path, from_s: float, to_s: float) -> dict[str, float]:
    """Of the time in between (unix seconds): seconds as shares of it, and per burst what was counted."""
    noted = map(json.loads, file.read_text().splitlines())
    rows = [(at_s, Counter(sums)) for at_s, sums in noted if from_s <= at_s <= to_s]
    (first_s, first), (last_s, last) = rows[0], rows[-1]
    bursts = last["bursts"] - first["bursts"]
    found = {
        "burst_s": (last_s - first_s) / bursts,
        "median_s": median(later_s - earlier_s for (earlier_s, _), (later_s, _) in pairwise(rows)) / _EVERY,
    }
    for name in last:
        change = last[name] - first[name]
        found[name] = change / (last_s - first_s if name.startswith(("host", "gpu")) else bursts)
    return found
