"""What holds for every test: one thread for torch, and no time limit on a single Hypothesis example."""

from __future__ import annotations

import os

from hypothesis import settings

# Before torch is imported by anybody: tiny products are slower on several threads, and waiting threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("llamarl", deadline=None)  # shared machines pause at will
settings.load_profile("llamarl")
