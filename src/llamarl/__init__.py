"""LlamaRL: asynchronous reinforcement learning for language models."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.generate.llm import LLM as LLM
    from llamarl.jobs.job import Job as Job
    from llamarl.observe.callbacks import Callback as Callback
    from llamarl.observe.callbacks import EvaluationDone as EvaluationDone
    from llamarl.observe.callbacks import StopTraining as StopTraining
    from llamarl.observe.callbacks import UpdateDone as UpdateDone
    from llamarl.observe.metric_logger import MetricLogger as MetricLogger
    from llamarl.runs.run import Run as Run
    from llamarl.tasks.task import Task as Task
    from llamarl.types import Problem as Problem
    from llamarl.types import Sampling as Sampling
    from llamarl.types import Turn as Turn

# Otherwise torch's oneDNN leaves a /tmp/perf-PID.map behind for every process, for a profiler that nobody runs.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")

__version__ = "0.1.0"
_HOMES = {
    "LLM": "llamarl.generate.llm",
    "Callback": "llamarl.observe.callbacks",
    "EvaluationDone": "llamarl.observe.callbacks",
    "Job": "llamarl.jobs.job",
    "MetricLogger": "llamarl.observe.metric_logger",
    "Problem": "llamarl.types",
    "Run": "llamarl.runs.run",
    "Sampling": "llamarl.types",
    "StopTraining": "llamarl.observe.callbacks",
    "Task": "llamarl.tasks.task",
    "Turn": "llamarl.types",
    "UpdateDone": "llamarl.observe.callbacks",
}
__all__ = [
    "LLM",
    "Callback",
    "EvaluationDone",
    "Job",
    "MetricLogger",
    "Problem",
    "Run",
    "Sampling",
    "StopTraining",
    "Task",
    "Turn",
    "UpdateDone",
    "__version__",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports a public class when it is first asked for, so that `import llamarl` imports no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'llamarl' has no attribute '{name}'")
