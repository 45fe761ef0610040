"""Looks at the memory that an executor's process holds, now and then."""

from __future__ import annotations

import resource
import time

import torch

from llamarl.machine import MemoryPeak

_EVERY_S = 0.25  # asking a GPU is a call of its driver; envelopes may be milliseconds apart


class MemoryWatch:
    """Tells the most memory that this process has held, and what is taken of its GPU."""

    def __init__(self) -> None:
        self._looked_s = 0.0

    def take(self) -> MemoryPeak | None:
        """None if it was looked at a moment ago."""
        if (now_s := time.monotonic()) - self._looked_s < _EVERY_S:
            return None
        self._looked_s = now_s
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return MemoryPeak(host)
        device = max(range(torch.cuda.device_count()), key=torch.cuda.max_memory_reserved)
        if not (held := torch.cuda.max_memory_reserved(device)):
            return MemoryPeak(host)  # asking a GPU that was not used would take some of its memory
        free, total = torch.cuda.mem_get_info(device)
        return MemoryPeak(host, held, total - free, total)
