"""An executor's memory: what it frees it will soon want again.

glibc gives large blocks back to the kernel as soon as they are freed, and every page of the next one is then faulted in anew:
up to ten thousand faults in one decode step on a CPU, which took as long as the step itself.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEPT_BYTES = 1 << 30  # free memory at the end of the heap
_OWN_BLOCK_BYTES = 32 << 20  # blocks from this size on are the kernel's; more is not allowed


def keep_freed_memory() -> None:
    """Elsewhere than with glibc nothing happens."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_TRIM_THRESHOLD, _KEPT_BYTES)
        adjust(_MMAP_THRESHOLD, _OWN_BLOCK_BYTES)
