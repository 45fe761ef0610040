"""Metrics for TensorBoard, if the config asks for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from llamarl.config import ObserveConfig
from llamarl.errors import ConfigError


class Board(Protocol):
    """Receives the metrics of every update."""

    def add(self, update: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NoBoard:
    """A board that ignores all metrics."""

    def add(self, update: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """A board that writes TensorBoard event files."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def add(self, update: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update)

    def close(self) -> None:
        self._writer.close()


def make_board(settings: ObserveConfig, run_folder: Path) -> Board:
    return TensorBoard(run_folder / "tensorboard") if settings.tensorboard else NoBoard()


def check_board(settings: ObserveConfig) -> None:
    """Raise ConfigError if TensorBoard is asked for but not installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("observe.tensorboard: the package is missing; pip install 'llamarl[tensorboard]'")
