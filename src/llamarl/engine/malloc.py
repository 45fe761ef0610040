"""Keeps the memory that an executor frees, since it will soon need it again.

glibc returns large blocks to the kernel as soon as they are freed, and every page of the next block is then faulted in again:
up to ten thousand faults in one decode step on a CPU, which took as long as the step itself.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEPT_BYTES = 1 << 30  # of free memory at the end of the heap
_OWN_BLOCK_BYTES = 32 << 20  # larger blocks are mapped one by one; the highest value that glibc allows


def keep_freed_memory() -> None:
    """Raise malloc's thresholds; without glibc, a no-op."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_TRIM_THRESHOLD, _KEPT_BYTES)
        adjust(_MMAP_THRESHOLD, _OWN_BLOCK_BYTES)
