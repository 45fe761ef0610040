"""LlamaRL: asynchronous reinforcement learning for language models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.jobs.job import Job as Job

# torch's oneDNN leaves a /tmp/perf-PID.map behind for every process, for a profiler that nobody runs.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")

__version__ = "0.1.0"
__all__ = ["Job", "__version__"]


def __getattr__(name: str) -> Any:
    """`Job` pulls torch in, so it is imported when it is first asked for."""
    if name == "Job":
        from llamarl.jobs.job import Job

        return Job
    raise AttributeError(f"module 'llamarl' has no attribute '{name}'")
