"""`observe`: optional records of a run, in its folder and elsewhere."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class ObserveConfig(Section, frozen=True):
    """Records that can be switched on or limited: the event log, and loggers."""

    loggers: Annotated[
        str | tuple[str, ...],
        Meta(
            description="where metrics go besides the run folder: tensorboard, wandb, trackio, mlflow; one name or a list"
        ),
    ] = ()
    project: Annotated[
        str,
        Meta(
            min_length=1, max_length=100, description="project (MLflow: experiment) that the loggers file the run under"
        ),
    ] = "llamarl"
    run_name: Annotated[
        str, Meta(max_length=100, description="name of the run for the loggers; empty: that of the run folder")
    ] = ""
    samples: Annotated[
        int, Meta(ge=0, le=100, description="rollouts in each table of samples that the loggers get; 0: no tables")
    ] = 8
    samples_every: Annotated[
        int,
        Meta(ge=0, description="updates from one table of training rollouts to the next; 0: only those of evaluations"),
    ] = 10
    wait_s: Annotated[
        float, Meta(ge=0, le=3600, description="longest time that the end of a job waits for its loggers")
    ] = 30.0
    tensorboard: Annotated[bool, Meta(description="the same as tensorboard among observe.loggers")] = False
    events_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="size limit of the controller's event log (about 25 bytes per group); 0: no event log",
        ),
    ] = 1024
    rollouts_mb: Annotated[
        int,
        Meta(
            ge=-1,
            description="size limit of the trained rollouts that stay readable, shared by all updates: whole groups, "
            "at least one of each update; -1: all rollouts, 0: none",
        ),
    ] = 1024
    spans_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="size limit of spans.jsonl, the timeline that `llamarl view` shows of a live or crashed run; 0: none",
        ),
    ] = 128

    @property
    def logger_names(self) -> tuple[str, ...]:
        """Names of the loggers, each once."""
        named = (self.loggers,) if isinstance(self.loggers, str) else self.loggers
        return tuple(dict.fromkeys([*(["tensorboard"] if self.tensorboard else []), *filter(None, named)]))
