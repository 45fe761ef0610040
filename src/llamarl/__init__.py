"""LlamaRL: asynchronous reinforcement learning for language models."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.generate.llm import LLM as LLM
    from llamarl.jobs.job import Job as Job
    from llamarl.runs.run import Run as Run
    from llamarl.types import Sampling as Sampling

# Otherwise torch's oneDNN leaves a /tmp/perf-PID.map behind for every process, for a profiler that nobody runs.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")

__version__ = "0.1.0"
__all__ = ["LLM", "Job", "Run", "Sampling", "__version__"]

_HOMES = {
    "Job": "llamarl.jobs.job",
    "LLM": "llamarl.generate.llm",
    "Run": "llamarl.runs.run",
    "Sampling": "llamarl.types",
}


def __getattr__(name: str) -> Any:
    """Imports a public class when it is first asked for, so that `import llamarl` imports no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'llamarl' has no attribute '{name}'")
