"""What a logger is: something outside the run folder that is told of a run's config, metrics, evaluations and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from msgspec import Struct

Kind = Literal["metrics", "evaluations", "evaluation_samples", "training_samples"]
EVALUATION: Final = "evaluation_samples"
TRAINING: Final = "training_samples"
ACCURACY = "held_out_accuracy"  # name of an evaluation's mean score


class LoggedRun(Struct, frozen=True):
    """The run that a logger is told of. A resumed run has the `id` and `name` of its first start."""

    id: str  # random, made once for each run folder
    name: str
    project: str
    folder: Path  # the run folder
    settings: Mapping[str, Any]  # of the job, flat: `trainer.lr`
    start: int = 0  # number of this start of the job; 0 is the first
    sent: Mapping[
        Kind, int
    ] = {}  # first step that earlier starts did not send, by kind; the one before may be incomplete


class SampleRow(Struct, frozen=True):
    """One rollout in a table of samples. Its text is printable and of bounded length, but comes from a model: hostile."""

    ordinal: int
    prompt: str
    answer: str
    expected: str  # the answer that the task gives
    reward: float
    num_tokens: int  # sampled tokens
    truncated: bool  # ended by the token limit

    @classmethod
    def columns(cls) -> list[str]:
        """Names of the columns of a table of samples."""
        return list(cls.__struct_fields__)

    def cells(self) -> list[Any]:
        """Values in the order of `columns`."""
        return [getattr(self, name) for name in self.__struct_fields__]


class MetricLogger(Protocol):
    """Receives what a job reports. Subclasses override what they need.

    All methods are called in a thread of the logger's own, in this order: `start`, any number of `log_...`, `finish`. What
    they raise is told in one line and never stops the job; while they block, up to a bound, reports wait.
    """

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        """Open the log, or continue that of an earlier start. Returns, where the log itself can tell, the first step that it
        lacks, by kind of report; for other kinds, the marks in the run folder count."""
        return {}

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Log the metrics of an update. Updates come in order, each once, also after a resume or a rewind."""
        return

    def log_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        """Log an evaluation of a version of the policy."""
        return

    def log_samples(self, kind: Kind, step: int, rows: Sequence[SampleRow]) -> None:
        """Log a table of rollouts: those of an evaluated version, or those that an update trained on."""
        return

    def finish(self, outcome: str) -> None:
        """Close the log; `outcome` is "finished", or the reason why the job stopped."""
        return
