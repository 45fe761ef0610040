"""Where the metrics of every update go besides the run folder; the config says where. A new logger is added here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from llamarl.config import ObserveConfig
from llamarl.errors import ConfigError
from llamarl.observe.tensorboard import TensorBoard


class MetricLogger(Protocol):
    """Receives the metrics of every update."""

    def add(self, update: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def make_loggers(settings: ObserveConfig, run_folder: Path) -> list[MetricLogger]:
    return [TensorBoard(run_folder / "tensorboard")] if settings.tensorboard else []


def check_loggers(settings: ObserveConfig) -> None:
    """Raise ConfigError if a logger is asked for whose package is not installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("observe.tensorboard: the package is missing; pip install 'llamarl[tensorboard]'")
