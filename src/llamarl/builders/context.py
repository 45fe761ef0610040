"""The context of an executor: everything that a builder is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.config import Config
from llamarl.executors.executor import Executor
from llamarl.messages import Report
from llamarl.tasks.failures import to_stderr
from llamarl.weights.rendezvous import Rendezvous
from llamarl.weights.slot_file import SlotFile


@dataclass(frozen=True)
class BuildContext:
    """What an executor is built from: the config, its own name, and the weight slots of every role that publishes."""

    config: Config
    executor: str
    slots: Mapping[str, SlotFile]  # by publishing role
    weights_source: Mapping[str, str]  # reading role -> publishing role
    snapshot: Path | None = None  # where a role that trains continues from; None: from the beginning
    rank: int = 0
    num_ranks: int = 1
    tell_engine: Callable[[Report], None] = lambda report: None  # for reports that cannot wait until the work is done
    gpu: int | None = None  # number on its host; None: the builder chooses
    log: Callable[[str], None] = to_stderr  # for text that is too long for a report, such as tracebacks
    given: Mapping[str, Callable[..., Any]] = field(
        default_factory=dict
    )  # scorers given from Python; empty unless the executor lives in the same process
    rendezvous: Rendezvous | None = None  # how weights cross hosts; None: they stay on one host, in slots
    first_gpus: Mapping[str, int] = field(default_factory=dict)  # role -> its first GPU, where the engine chose none


Builder = Callable[[BuildContext], Executor]
